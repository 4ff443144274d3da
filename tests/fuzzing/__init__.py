"""Random cases of attention, each drawn from its own number and compared with a dense oracle.

`dice` draws, `maps`, `tokens` and `machine` say what; `weights`, `who` and `oracle` are the truth, quadratic and in
float64, which shares nothing with the product but the maps' own features; `limits` says what is refused; `kinds` has
one file for each way to call attention; `running` runs cases by number.
"""
