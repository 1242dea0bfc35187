"""`make device`: what a device answers and how fast, on whatever device mlx has, without a hub.

`python -m benchmarks.device [--parts] [--part N] [--small] [--state FILE] [--out DIR]`.

    shapes    models of known shapes with random weights
    forcing   answers with given tokens, through the engine's own passes
    parity    rows in every way beside the rows alone
    speed     our engine and mlx-lm's BatchGenerator in turn
    serving   servers over HTTP, embeddings, the lane
    parts     what is run, numbered
    results   what parts find, and the file that keeps it
    machine   what is measured on
    page      docs/devices/<device>-<date>.md
    table     the table of all pages
"""
