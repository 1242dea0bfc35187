"""huggingface_hub's feature extraction, unchanged, from /embed at the address that is given."""

import sys

import numpy as np
from huggingface_hub import InferenceClient

TEXTS = ["A dog barks at strangers.", "A hound growls.", "Paris lies on the Seine."]


def main(url: str) -> None:
    client = InferenceClient(model=f"{url}/embed")
    vectors = [
        client.feature_extraction(
            text, normalize=True, truncate=True, truncation_direction="right"
        )[0]
        for text in TEXTS
    ]
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    dog, hound, paris = vectors
    assert dog @ hound > dog @ paris
    print("1 passed")


if __name__ == "__main__":
    main(sys.argv[1])
