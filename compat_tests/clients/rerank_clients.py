"""Cohere's SDK, LiteLLM, LangChain and llama-index, each asking for a ranking of the same texts."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import cohere
import langchain_cohere
import litellm
from langchain_core.documents import Document
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

MODEL = "all-minilm-l6-v2"
QUERY = "Which animal barks?"
TEXTS = ["The sea is salty.", "A dog barks at strangers.", "Paris lies on the Seine."]
BEST = 1


def check(client: str, ranking: list[int], scores: list[float]) -> None:
    assert ranking[0] == BEST, (client, ranking)
    assert scores == sorted(scores, reverse=True), (client, scores)
    assert all(0 <= score <= 1 for score in scores), (client, scores)
    print(client, ranking, [round(score, 4) for score in scores])


def main(url: str) -> None:
    v2 = cohere.ClientV2("unused", base_url=url)
    answer = v2.rerank(model=MODEL, query=QUERY, documents=TEXTS, top_n=2)
    check(
        "cohere v2",
        [each.index for each in answer.results],
        [each.relevance_score for each in answer.results],
    )
    assert len(answer.results) == 2
    v1 = cohere.Client("unused", base_url=url)
    old = v1.rerank(model=MODEL, query=QUERY, documents=TEXTS, return_documents=True)
    check("cohere v1", [r.index for r in old.results], [r.relevance_score for r in old.results])
    assert old.results[0].document is not None
    assert old.results[0].document.text == TEXTS[BEST]

    for provider in ("cohere", "hosted_vllm", "infinity", "jina_ai"):
        found = litellm.rerank(
            model=f"{provider}/{MODEL}",
            query=QUERY,
            documents=TEXTS,
            top_n=3,
            return_documents=provider != "infinity",  # it reads a string where ours is an object
            api_base=url,
            api_key="unused",
        )
        check(
            f"litellm {provider}",
            [each["index"] for each in found.results],
            [each["relevance_score"] for each in found.results],
        )

    compressor = langchain_cohere.CohereRerank(
        model=MODEL, cohere_api_key="unused", base_url=url, top_n=3
    )
    documents = [Document(page_content=text) for text in TEXTS]
    kept = compressor.compress_documents(documents, QUERY)
    check(
        "langchain cohere",
        [TEXTS.index(each.page_content) for each in kept],
        [each.metadata["relevance_score"] for each in kept],
    )

    for name, reranker in (
        ("llama-index cohere", CohereRerank(3, MODEL, "unused", url)),
        ("llama-index tei", TextEmbeddingInference(top_n=3, base_url=url)),
    ):
        nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]
        sorted_nodes = reranker.postprocess_nodes(nodes, QueryBundle(QUERY))
        check(
            name,
            [TEXTS.index(each.node.get_content()) for each in sorted_nodes],
            [float(each.score or 0) for each in sorted_nodes],
        )


main(sys.argv[1])
