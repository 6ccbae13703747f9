"""AxoNN's 4D algorithm in torch: layers, model, optimizer, checkpoints and trainer.

Docstrings write shapes with the letters below; the last part of a name such as ``qkv_tn`` lists
the dimensions of a tensor. Sizes are those of the whole model: the part that one rank holds is
written as a quotient, such as ``(b, s, d / G_x)``, where G_x, G_y, G_z and G_data are the sizes of
the grid's axes. Only b and t count what this rank works on, since Z and data split the batch.

    b   sequences of a micro-batch on this rank
    s   positions of a sequence
    t   tokens on this rank, b * s
    d   hidden dimension
    f   hidden dimension of the MLP
    v   vocabulary, padded
    h   heads of the queries
    g   heads of the keys and values
    q   queries that share one key and value, h / g
    e   elements of a head
    m, k, n   a matrix product: (m, k) times (k, n)
"""
