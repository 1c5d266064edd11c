"""Keys of classification, embeddings and reranking: the tasks of Hugging Face and sentence-transformers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from .methods import CLASSIFYING, RETRIEVING, method_field
from .section import Section


class TaskSection(Section):
    """Classification, embeddings and reranking"""

    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] = method_field(
        CLASSIFYING[:1], "single_label_classification", "kind of the labels, as in transformers"
    )
    labels: list[str] | None = method_field(
        CLASSIFYING, None, "names of the labels in the order of their ids; default: the training rows' labels, sorted"
    )
    num_labels: PositiveInt | None = method_field(
        CLASSIFYING, None, "number of labels; default: length of labels, or number of labels in the training rows"
    )
    pooling: Literal["last", "mean"] = method_field(
        RETRIEVING[:1], "last", "hidden states that make an embedding: the last token's, or the mean of all tokens'"
    )
    normalize_embeddings: bool = method_field(RETRIEVING[:1], True, "divide embeddings by their norm")
    similarity_scale: Annotated[float, Field(gt=0)] = method_field(
        RETRIEVING[:1], 20.0, "factor of cosine similarities in the loss, the inverse of a temperature"
    )
    query_prompt: str = method_field(RETRIEVING, "", "text before each query (anchor, first sentence)")
    document_prompt: str = method_field(RETRIEVING, "", "text before each document (positive, negative)")

    @field_validator("labels", mode="before")
    @classmethod
    def _names_of_labels(cls, value: Any) -> Any:
        """Accept numbers as names; refuse empty and repeated names, and a single one."""
        if not isinstance(value, list):
            return value
        names = [str(name) if isinstance(name, int) and not isinstance(name, bool) else name for name in value]
        texts = [name for name in names if isinstance(name, str)]
        if repeated := next((name for name in texts if texts.count(name) > 1), None):
            raise PydanticCustomError("repeated", "names {value} twice", {"value": repr(repeated)})
        if len(names) < 2 or not all(name.strip() for name in texts):
            raise PydanticCustomError("empty", "must name at least two labels, not {value}", {"value": repr(value)})
        return names
