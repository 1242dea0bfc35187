"""Answers held to a form: from what a caller asks for to the mask of a step.

structured     what one model can be held to, and whether an answer fits; the entry to this room
calls          functions that may be called → a grammar
schemas        JSON Schemas as values: read, checked by their draft, walked, rebuilt
unenforced     what of a schema no grammar holds: left out and named; words for a refusal
patterns       regular expressions: which are held, how long they match; dates
schema_bounds  a schema drawn tighter: strings, arrays and numbers are bounded
compiling      a grammar → what sequences are matched against, by llguidance
tokenizer      a model's tokens as grammars need them
matching       where a sequence stands in its grammar, and the masks of a step
"""
