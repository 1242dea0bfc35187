"""Answers held to a form: from what a caller asks to the mask of a step.

structured     what one model can be held to; the face of this room
calls          functions that may be called → a grammar
schemas        JSON Schemas: read, checked, brought up to date
shaping        a schema drawn tighter, so that a small model stays on course
compiling      a grammar → what rows are matched against, by llguidance
indexes        the same by outlines_core, in a process of its own (index_worker)
matching       where a row stands, and the masks of a step
"""
