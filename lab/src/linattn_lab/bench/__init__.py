"""How fast linear attention is on given shapes, next to exact attention, and from which length on it pays."""
