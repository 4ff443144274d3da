"""Methods in their written form: a feature map, with a window or without, or merged keys; their size and error."""
