"""Claims of "The Kernel Trick: Math Behind Linearization"."""
