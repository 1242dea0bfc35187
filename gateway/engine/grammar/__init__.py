"""Answers held to a form: from a caller's wishes to the mask of a step.

structured     the forms that one model can hold, and whether an answer fits; the entry to this room
calls          functions that may be called → a grammar
schemas        JSON Schemas as values: read, checked by their draft, walked, rebuilt
unenforced     the parts of a schema that no grammar holds: left out, named; words for a refusal
patterns       regular expressions: which are held, how long they match; dates
schema_bounds  a schema drawn tighter: strings, arrays and numbers are bounded
compiling      a grammar → the matchers of sequences, by llguidance
tokenizer      a model's tokens in the form that grammars need
matching       the place of a sequence in its grammar, and the masks of a step
"""
