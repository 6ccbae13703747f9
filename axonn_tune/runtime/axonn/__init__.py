"""AxoNN's 4D algorithm in torch: layers, model, optimizer, trainer."""
