"""Claims of "Starting from an Expandable Term: Derivation from Softmax to Performer Linear Attention"."""
