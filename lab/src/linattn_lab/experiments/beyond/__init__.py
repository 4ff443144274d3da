"""What the texts and the paper leave out."""
