"""Chat tokens a second: the gateway, mlx-lm's batch generator in-process, mlx-lm's server."""

from gateway.bench.batch_generator import BatchReference
from gateway.bench.load import burst
from gateway.bench.targets.rig import CHAT, Rig, errors, rate, rest
from gateway.bench.targets.verdicts import Target, Verdict

TOKENS = 96
INSIDE = {
    streams: Target(f"chat tokens/s, streams: {streams}; HTTP / BatchGenerator in-process", 0.95)
    for streams in (1, 8, 32)
}
SERVER = {
    streams: Target(f"chat tokens/s, streams: {streams}; HTTP / mlx-lm's own server", least)
    for streams, least in ((1, 1.1), (8, 1.2), (32, 1.5))
}
MLX_LM_NAME = "default_model"  # what its server calls the one it was started with


async def chat(rig: Rig) -> list[Verdict]:
    """So many streams begin at once and are as long; all three in turn, in each round."""
    tokens = max(16, round(rig.seconds(TOKENS)))
    verdicts = []
    inside = BatchReference(rig.folder / CHAT)
    async with rig.gateway() as ours, rig.mlx_lm() as theirs:
        for streams in INSIDE:
            to_inside, to_server, rates = [], [], []
            wrong = lost = 0
            for number in range(rig.rounds + 1):
                own = await burst(ours, rig.chats(tokens), streams)
                await rest()
                wording = rig.wording(CHAT, max_tokens=tokens)
                prompts = [wording.prompts[n] for n in range(streams)]
                reference = inside.rate(prompts, tokens)
                await rest()
                other = await burst(theirs, rig.chats(tokens, MLX_LM_NAME), streams)
                await rest()
                wrong += errors(own)
                lost += errors(other)
                if number == 0:  # each of the three makes its shapes
                    continue
                to_inside.append(rate(own) / reference)
                to_server.append(rate(own) / max(rate(other), 1e-9))
                rates.append((rate(own), reference, rate(other)))
            middle = sorted(rates)[len(rates) // 2]
            note = f"{middle[0]:.0f} / {middle[1]:.0f} tokens/s"
            verdicts.append(INSIDE[streams].judge(to_inside, errors=wrong, note=note))
            note = f"{middle[0]:.0f} / {middle[2]:.0f} tokens/s"
            if lost:
                note += f"; it lost {lost} of {streams * (rig.rounds + 1)} requests"
            verdicts.append(SERVER[streams].judge(to_server, errors=wrong, note=note))
    return verdicts
