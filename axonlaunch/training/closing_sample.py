"""What a run on text generates when it has trained, which no longer fails for what it refuses."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from axonlaunch.config import RunConfig
from axonlaunch.config.documents import ChatConfig
from axonlaunch.data.dataset import Dataset
from axonlaunch.data.first_question import first_question
from axonlaunch.data.mix import AnyText
from axonlaunch.events import Listener, Noted, SampleGenerated
from axonlaunch.models.generation import generate
from axonlaunch.training.conversation import Conversation
from axonlaunch.training.sampling import TrainedText

_PROMPT = "def "
"""What a model of text continues where nothing is asked for."""


def generate_sample(
    config: RunConfig,
    predict: Callable[[Tensor], Tensor],
    dataset: Dataset,
    *,
    report: Listener,
) -> None:
    """Let a model of text continue the prompt, or report why it can't; every rank calls this.

    Args:
        config: The run's.
        predict: Tokens to logits, of all ranks together.
        dataset: What turns text into tokens and back.
        report: Takes the text.
    """
    if not config.sample.max_new_tokens or dataset.kind != "tokens" or not dataset.is_text:
        return
    try:  # what is refused on one rank is so on all, before any has called the model
        report(_sample(config, predict, dataset))
    except ValueError as error:
        report(Noted(f"no text is generated at the end, as that was refused: {error}"))


def _sample(
    config: RunConfig, predict: Callable[[Tensor], Tensor], dataset: Dataset
) -> SampleGenerated:
    """Return what the model says.

    Raises:
        ValueError: The chat template refuses the question, or there is none.
    """
    prompt, tokens = config.sample.prompt or _PROMPT, config.sample.max_new_tokens
    length = dataset.sample_shape[0]
    if not isinstance(dataset, AnyText):
        written = generate(
            predict,
            dataset.encode(prompt),
            max_new_tokens=tokens,
            context_length=length,
            seed=config.seed,
        )
        return SampleGenerated(prompt, dataset.decode(written))
    trained = TrainedText(predict, length, dataset.tokenizer)
    if isinstance(config.data, ChatConfig):
        prompt = config.sample.prompt or first_question(config.data)
        conversation = Conversation(trained, tokens=tokens, seed=config.seed)
        return SampleGenerated(prompt, f"\n{conversation.answer(prompt)}")
    written = trained.generate(dataset.encode(prompt), max_new_tokens=tokens, seed=config.seed)
    return SampleGenerated(prompt, dataset.decode(written))
