"""How much weight each mode gives to tokens, sequences, lengths and rewards of real rollouts."""
