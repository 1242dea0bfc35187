"""Tokens → an answer's text, reasoning and calls; without mlx. From the bottom up:

detokenizer    token ids → text; the vocabulary as bytes
stop_strings   the end before a stop string
output_parts   an answer's parts: text, reasoning, calls; the marks between them
harmony        gpt-oss's channels
call_values    calls and their readers; the text of an argument → its value, by its schema;
               JSON and Python as models write them; calls → their text
call_bodies    calls whose own text says where they end: JSON, Python
gemma_calls    the bodies of Gemma's calls
minimax_calls  the bodies of MiniMax M3's calls
pairs          calls whose arguments are pairs of a name and a text
tool_formats   a row for each family's way to write calls; picks one by the chat template
reasoning      a row for each way to mark thinking; whether a sequence is thinking
parsing        text → parts, as it comes
response_template  whole answers by their checkpoint's own patterns, in the sandbox
answer_format  one model's formats with its tokens: makes the parsers of its answers
"""
