"""The project's own targets: ratios, measured on one machine in one run.

`make bench`, or `python -m benchmarks.targets [--quick] [--only NAME] [--json FILE]`. Each
measurement alternates with its reference, five times; the median counts.

    verdicts    a target, its measured value, whether it is met; the table
    rig         the parts that all measurements share: models with random weights, servers, rounds
    embedding   MiniLM: many clients, one client, a burst, a long request
    small       a near-free model: requests a second; errors with many connections
    chatting    tokens a second beside mlx-lm's generator and its server
    host        a token's cost beside the arithmetic: in-process, and over HTTP
    onboard     SmolLM2's tokens a second beside mlx-lm's server and llama.cpp
    structured  grammar-bound answers together; one beside a free one
    beside      embeddings beside chat, and chat beside embeddings
    prefix      time to first token with a prefix that was read before
    starting    from a process's start to its first answers
    recording   the share of a request that counting and timing take
"""
