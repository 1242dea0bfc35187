"""Constrains answers to a format: from a caller's wishes to the mask of a step.

structured     one model's grammars and masks; checks whether an answer fits; entry to this room
calls          makes a grammar from the functions that may be called
schemas        JSON Schemas as values: reads, checks, walks and rebuilds them
unenforced     leaves out and names the parts of a schema that no grammar can enforce
patterns       regular expressions: which can be enforced, how long their matches are; dates
schema_bounds  tightens a schema: bounds strings, arrays and numbers
compiling      compiles a grammar to the matchers of sequences, with llguidance
tokenizer      a model's tokens in the form that grammars need
matching       the place of a sequence in its grammar, and the masks of a step
"""
