"""Small trainings on one device, for the tests on a GPU."""

from worlds import llama

from axonn_tune.runtime import GPT, Engine, Optimizer, RandomTokens, Trainer
from axonn_tune.runtime.axonn.mesh import Alone
from axonn_tune.spec.model import Model

SEQ_LEN = 64
MODELS = {
    "gpt": Model("gpt", 2, 128, 2, 512, SEQ_LEN),
    "llama": llama(
        n_layers=2,
        hidden_size=128,
        n_heads=4,
        n_kv_heads=2,
        ffn_hidden_size=256,
        vocab_size=512,
        seq_len=SEQ_LEN,
    ),
}
# 0.2 billion parameters in blocks as wide as those of a model of 1.3 billion.
WIDE = Model("wide", 4, 2048, 16, 16384, 2048)


class Training:
    """A model, its optimizer and its trainer."""

    def __init__(self, spec, device, dtype, batch, seq_len, micro_batch=None, record=True, **more):
        tuning = more.pop("tuning", False)
        self.engine = Engine(Alone(device), dtype, kernel_tuning=tuning, record=record)
        self.model = GPT(self.engine, spec, **more)
        self.optimizer = Optimizer(self.model, self.engine)
        text = RandomTokens(spec.vocab_size, seq_len)
        self.trainer = Trainer(self.model, self.optimizer, text, batch, micro_batch or batch)

    def curve(self, n_steps):
        """Loss and norm of the gradient in some steps on the same text."""
        steps = [self.trainer.step(0) for _ in range(n_steps)]
        return [number for step in steps for number in (step.loss, step.gradient_norm)]
