# Train the quickstart from Python, and write the loss of every step to a CSV file.

import csv

import graphtrain as gt


class CsvLog(gt.Callback):
    def __init__(self, path):
        self.path = path

    def on_step(self, step, metrics):
        with open(self.path, "a", newline="") as file:
            csv.writer(file).writerow([step, metrics["loss"], metrics["tokens_per_second"]])

    def on_evaluate(self, step, metrics):
        print(f"step {step}: validation loss {metrics['validation_loss']:.4f}")


gt.compile("examples/quickstart.toml")
gt.train("examples/quickstart.toml", callbacks=[CsvLog("losses.csv")])
