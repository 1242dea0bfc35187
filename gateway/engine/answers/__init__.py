"""Turns tokens into an answer's text, reasoning and calls, without mlx. From the bottom up:

detokenizer    decodes token ids into text
stop_strings   ends a text before its first stop string
output_parts   the parts of an answer, and the marks between the parts
harmony        reads gpt-oss's channels
call_values    converts the texts of arguments to values, and writes calls as text
call_bodies    reads calls whose bodies are JSON or Python
gemma_calls    reads Gemma's calls
minimax_calls  reads MiniMax M3's calls
pairs          reads calls whose arguments are pairs of a name and a text
tool_formats   one row per call format; picks a model's format by its chat template
reasoning      one row per way to mark thinking; tracks whether a sequence is thinking
parsing        splits a growing text into parts
response_template  reads whole answers with the checkpoint's own patterns
answer_format  makes the parsers of a model's answers
"""
