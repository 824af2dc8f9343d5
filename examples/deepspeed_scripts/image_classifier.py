"""A DeepSpeed script with one changed line: an image classifier with `training_data` and command-line arguments.

    torchrun --nproc_per_node 2 examples/deepspeed_scripts/image_classifier.py \\
        --deepspeed --deepspeed_config examples/deepspeed_scripts/image_classifier.json --epochs 3

The images are drawn, not downloaded: bars and boxes at random places under noise, and the task is to tell their kind.
"""

import argparse

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.utils.data import Dataset

import naught as deepspeed

KINDS = 4


class Shapes(Dataset):
    """Images of 3 x 16 x 16 with a horizontal bar, a vertical bar, a filled box or a hollow one."""

    def __init__(self, count, seed):
        dice = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(KINDS, (count,), generator=dice)
        self.images = torch.randn(count, 3, 16, 16, generator=dice) * 0.3
        corners = torch.randint(1, 8, (count, 2), generator=dice)
        for image, label, (y, x) in zip(self.images, self.labels.tolist(), corners.tolist(), strict=True):
            if label == 0:
                image[:, y : y + 2, 1:15] += 1
            elif label == 1:
                image[:, 1:15, x : x + 2] += 1
            else:
                image[:, y : y + 6, x : x + 6] += 1
                if label == 3:
                    image[:, y + 2 : y + 4, x + 2 : x + 4] -= 1

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32)
        self.fc1, self.fc2 = nn.Linear(32 * 4 * 4, 64), nn.Linear(64, KINDS)

    def forward(self, images):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def parse_arguments():
    parser = argparse.ArgumentParser(description="An image classifier, as a DeepSpeed script")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--local_rank", type=int, default=-1, help="given by some launchers")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def evaluate(engine, dataset):
    engine.eval()
    right = torch.zeros(1, device=engine.device)
    with torch.no_grad():
        for start in range(0, len(dataset), 64):
            images, labels = dataset.images[start : start + 64], dataset.labels[start : start + 64]
            right += (engine(images.to(engine.device)).argmax(1) == labels.to(engine.device)).sum()
    engine.train()
    return right.item() / len(dataset)


def main():
    args = parse_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=Shapes(args.samples, seed=1)
    )
    held_out = Shapes(256, seed=2)
    for epoch in range(args.epochs):
        for images, labels in loader:
            images, labels = images.to(engine.device), labels.to(engine.device)
            loss = F.cross_entropy(engine(images), labels)
            engine.backward(loss)
            engine.step()
        accuracy = evaluate(engine, held_out)
        if engine.global_rank == 0:
            rate = optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch}: steps {engine.global_steps}, loss {loss.item():.4f}, accuracy {accuracy:.3f}, lr {rate:.2e}")


if __name__ == "__main__":
    main()
