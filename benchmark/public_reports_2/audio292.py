"""pytorch/audio#292: the mel filters' frequency axis ends at f_max, not at half of the sample rate."""
import math, numpy as np, torch, whywrong
RATE, F_MIN, F_MAX, BINS, MELS = 16000, 20.0, 5500.0, 129, 18
def filters(like):                                          # [BINS, MELS], triangles on the HTK scale
    mel = lambda f: 2595.0 * math.log10(1.0 + f / 700.0)
    freqs = torch.linspace(0, RATE / 2, BINS, dtype=like.dtype)
    edges = 700.0 * (10.0 ** (torch.linspace(mel(F_MIN), mel(F_MAX), MELS + 2, dtype=like.dtype) / 2595.0) - 1.0)
    wide = edges[1:] - edges[:-1]
    slopes = edges[None, :] - freqs[:, None]
    return torch.minimum(-slopes[:, :-2] / wide[:-1], slopes[:, 2:] / wide[1:]).clamp(min=0)
def reference(power):                                       # [BINS, frames]
    mel = whywrong.step("mel", filters(power).T @ power)
    db = whywrong.step("db", 10.0 * torch.log10(mel.clamp(min=1e-10)))
    mean = whywrong.step("mean", db.mean(1, keepdim=True))
    return whywrong.step("features", (db - mean) / (db.std(1, keepdim=True) + 1e-3))
def port(power, fault=False):
    top = F_MAX if fault else RATE / 2
    low = F_MIN if fault else 0.0
    to_mel = lambda f: 2595.0 * np.log10(1.0 + f / 700.0)
    edges = 700.0 * (10.0 ** (np.linspace(to_mel(F_MIN), to_mel(F_MAX), MELS + 2) / 2595.0) - 1.0)
    bank = np.zeros((MELS, BINS))
    for b in range(BINS):
        f = low + (top - low) * b / (BINS - 1)
        for m in range(MELS):
            lo, mid, hi = edges[m:m + 3]
            bank[m, b] = (f - lo) / (mid - lo) if lo < f <= mid else (hi - f) / (hi - mid) if mid < f < hi else 0.0
    mel = bank.astype(np.float32) @ power.numpy()
    db = np.float32(10) * np.log10(np.maximum(mel, np.float32(1e-10)))
    mean = db.mean(1, keepdims=True)
    features = (db - mean) / (db.std(1, ddof=1, keepdims=True) + np.float32(1e-3))
    made = {"mel": mel, "db": db, "mean": mean, "features": features}
    return {"power": power, **{n: torch.from_numpy(v.astype(np.float32)) for n, v in made.items()}}
torch.manual_seed(102)
power = torch.randn(BINS, 24).square() * torch.linspace(3, 0.1, BINS)[:, None].exp()
P = whywrong.Precision("float32")
g = whywrong.golden(reference, power=power)
