"""demo-chat, the tests' chat model: its weights in `chat/`, and how they were made and measured.

`models.yaml` serves it, from the folder `chat/`. demo-vision in `vision/`, which reads images, is
made in `seeing`. The rest makes demo-chat again, offline, in this order:

    phrasings/     how people ask: in training, and in the test
    wordings.py    phrasings drawn, filled, spelled out
    words.py       invented words, each on one side of the split
    facts.py       what it knows and its fixed sentences
    tools.py       tools offered, called and answered
    exchanges.py   one question and its answer, for each skill
    data.py        conversations from a seed
    tokens.py      the tokenizer and the chat template
    batches.py     conversations to arrays
    forward.py     the forward pass, quick on a CPU
    train.py       python -m demo.train --out DIR --minutes N
    train_head.py  python -m demo.train_head --out DIR --minutes N: a head that guesses ahead (MTP)
    measure_head.py  python -m demo.measure_head DIR: what such a head gains
    evaluate.py    python -m demo.evaluate [--model DIR]

The gateway knows nothing of this package. forward, train and evaluate import mlx, after the
engine's BLAS.
"""
