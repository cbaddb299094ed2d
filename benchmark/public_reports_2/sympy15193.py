"""sympy#15193: one entry of the rotation matrix of a quaternion, row 1, column 2, has + between its terms for -."""
import numpy as np, torch, whywrong
def reference(quat, points, origin):                        # [n, 4] as w x y z, [n, 3], [3]
    unit = whywrong.step("unit", quat / quat.square().sum(-1, keepdim=True).sqrt())
    w, x, y, z = unit.unbind(-1)
    rot = torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
                       2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
                       2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], -1)
    rot = whywrong.step("rot", rot.reshape(-1, 3, 3))
    turned = whywrong.step("turned", (rot @ points[..., None])[..., 0])
    return whywrong.step("world", turned + origin)
def port(quat, points, origin, fault=False):
    q, p = quat.numpy(), points.numpy()
    unit = q / np.linalg.norm(q, axis=1, keepdims=True)
    rot = np.zeros((len(q), 3, 3), np.float32)
    for n, (w, x, y, z) in enumerate(unit):                 # R = (w^2 - v.v) 1 + 2 v v^T + 2 w [v]x
        v = np.array([x, y, z], np.float32)
        cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]], np.float32)
        if fault:
            cross[1, 2] = x
        rot[n] = (w * w - v @ v) * np.eye(3, dtype=np.float32) + 2 * np.outer(v, v) + 2 * w * cross
    turned = np.einsum("nij,nj->ni", rot, p)
    made = {"unit": unit, "rot": rot, "turned": turned, "world": turned + origin.numpy()}
    return {"quat": quat, "points": points, "origin": origin, **{n: torch.from_numpy(v) for n, v in made.items()}}
torch.manual_seed(104)
i = dict(quat=torch.randn(36, 4), points=2 * torch.randn(36, 3), origin=torch.tensor([0.3, -1.2, 4.0]))
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
