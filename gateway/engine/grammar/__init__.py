"""Answers held to a form: from what a caller asks for to the mask of a step.

structured     what one model can be held to, and whether an answer fits; the entry to this room
calls          functions that may be called → a grammar
schemas        JSON Schemas as values: read, walked, rebuilt
drafts         a schema of any draft, checked by it and rewritten in the newest one
enforcement    the part of a schema that a grammar can hold, and what is left to be checked
disjoint       proofs that no value fits two schemas
patterns       regular expressions: how long they match, all but some words
forms          the forms of a schema that may be compiled, tightest first
obstacles      keywords that keep a schema from compiling, and words for a refusal
references     how far a schema leads through its references
shaping        a schema drawn tighter, so that a small model stays on course
translation    a schema rewritten in keywords that llguidance has
compiling      a grammar → what sequences are matched against, by llguidance
tokenizer      a model's tokens as grammars need them
trial          a first try in the sandbox, so that no grammar ends this process
matching       where a sequence stands in its grammar, and the masks of a step
"""
