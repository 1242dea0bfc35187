"""Tokens → an answer's text, reasoning and calls; without mlx. From the bottom up:

detokenizer   token ids → text; the vocabulary as bytes
stop_strings  the end before a stop string
output_parts  an answer's parts: text, reasoning, calls; the marks between them
tool_parsers  the text of a tool call → its function and arguments
harmony       gpt-oss's channels
tool_formats  how each family marks its tool calls; picks one by the chat template
reasoning     where thinking begins and ends
parsing       text → parts, as it comes
"""
