"""The shared vocabulary: frozen types that every other room speaks. Pure, NumPy only."""
