"""Write launcher/data/digits.parquet from the digits that scikit-learn ships.

usage: python tests/tools/make_digits.py      (needs scikit-learn and pyarrow; the same bytes every time)
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_digits

TARGET = Path(__file__).resolve().parents[2] / "launcher" / "data" / "digits.parquet"
HELD_OUT_EVERY = 4  # of each class's images, every fourth is for evaluation
METADATA = {
    "title": "Optical Recognition of Handwritten Digits (test part: 1797 images of 8 x 8 pixels, values 0 to 16)",
    "creators": "Ethem Alpaydin, Cevat Kaynak",
    "source": "UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, as shipped by scikit-learn",
    "license": "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/",
    "changes": "Parquet form; a split column was added",
}


def main() -> None:
    """Write the file."""
    digits = load_digits()
    seen = [0] * 10
    splits = []
    for label in digits.target:
        seen[label] += 1
        splits.append("eval" if seen[label] % HELD_OUT_EVERY == 0 else "train")
    pixels = pa.FixedSizeListArray.from_arrays(pa.array(digits.data.astype("uint8").reshape(-1)), 64)
    labels = pa.array(digits.target.astype("uint8"))
    table = pa.table({"pixels": pixels, "label": labels, "split": pa.array(splits)})
    TARGET.parent.mkdir(exist_ok=True)
    pq.write_table(table.replace_schema_metadata(METADATA), TARGET, compression="zstd")
    print(f"{TARGET}: {TARGET.stat().st_size} bytes, {splits.count('eval')} of {len(splits)} held out")


if __name__ == "__main__":
    main()
