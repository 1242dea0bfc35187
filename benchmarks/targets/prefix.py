"""Time to first token of long prompts: new ones, and those whose beginning was read before."""

from statistics import median

from benchmarks.targets.chatting import MLX_LM_NAME
from benchmarks.targets.rig import CHAT, Rig, errors, rest
from benchmarks.targets.verdicts import Target, Verdict, ratio
from benchmarks.workloads import chat
from gateway.bench.figures import Answer
from gateway.bench.load import Peer
from gateway.bench.requests import Texts

TOKENS = 2000
COLD = {
    tokens: Target(
        f"prompt of {tokens:,} tokens, time to first token: mlx-lm's own server / HTTP", 1
    )
    for tokens in (512, TOKENS)
}
WARM = Target("time to first token, 2,000 shared prefix tokens, warm / cold", at_most=0.15)


async def prefix(rig: Rig) -> list[Verdict]:
    """Each time a system prompt that is new, then another question after the same one."""
    samples, wrong, cached = [], 0, []
    pairs = max(2, round(rig.seconds(4)))
    async with rig.gateway() as peer:
        words = await _words(rig, peer, TOKENS)
        for _ in range(rig.rounds):
            cold, warm = [], []
            for _ in range(pairs):
                texts = rig.wording(CHAT, prompt_words=words).prompts
                questions = rig.wording(CHAT, prompt_words=10).prompts
                cold.append(await _ask(peer, texts, questions, 0))
                warm.append(await _ask(peer, texts, questions, 1))
            wrong += errors(cold) + errors(warm)
            samples.append(ratio(_first(warm), _first(cold)))
            cached += [answer.cached / max(answer.prompt, 1) for answer in warm]
    note = f"{median(cached):.0%} of {warm[0].prompt} prompt tokens cached"
    return [WARM.judge(samples, errors=wrong, note=note)]


async def cold(rig: Rig) -> list[Verdict]:
    """Prompts that are new, to both servers in turn: the same ones, each after a rest."""
    verdicts = []
    async with rig.gateway() as ours, rig.mlx_lm() as theirs:
        for tokens, target in COLD.items():
            words = await _words(rig, ours, tokens)
            wrong, times = 0, []
            for _ in range(rig.rounds + 1):  # both sides make their shapes in the first round
                prompt = rig.wording(CHAT, prompt_words=words).prompts[0]
                own = await ours.ask(chat(CHAT, prompt, max_tokens=4, is_streamed=True))
                await rest()
                other = await theirs.ask(chat(MLX_LM_NAME, prompt, max_tokens=4, is_streamed=True))
                await rest()
                wrong += errors([own])
                times.append((_first([other]), _first([own])))
            samples = [ratio(other, own) for other, own in times[1:]]
            samples = [ratio(other, own) for other, own in times[1:]]
            verdicts.append(target.judge(samples, errors=wrong, note=f"{own.prompt} tokens"))
    return verdicts


async def _ask(peer: Peer, system: Texts, questions: Texts, number: int) -> Answer:
    ask = chat(CHAT, questions[number], max_tokens=4, system=system[0], is_streamed=True)
    return await peer.ask(ask)


async def _words(rig: Rig, peer: Peer, tokens: int) -> int:
    """Find the number of words that makes this number of tokens."""
    guess = tokens // 2
    texts = rig.wording(CHAT, prompt_words=guess).prompts
    answer = await _ask(peer, texts, texts, 0)
    return max(1, round(guess * tokens / max(answer.prompt / 2, 1)))


def _first(answers: list[Answer]) -> float | None:
    times = [answer.first for answer in answers if answer.arrivals]
    return median(times) if times else None
