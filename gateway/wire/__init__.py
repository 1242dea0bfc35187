"""OpenAI's shapes and their translation to jobs and back. No HTTP, no time, no maths."""
