"""One chat model's rows: from the line they wait in to their last delta."""
