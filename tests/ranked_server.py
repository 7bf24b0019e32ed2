"""A server each rank of which writes down what it was told to verify and draft: RANKS/0.jsonl, RANKS/1.jsonl."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from faser.serving import serve
from faser.serving.worker import FaserWorker


class RankedWorker(FaserWorker):  # type: ignore[misc]  # its base depends on the platform
    def execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = {request: len(drafts) for request, drafts in scheduled.scheduled_spec_decode_tokens.items()}
        with (Path(os.environ["RANKS"]) / f"{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps([lengths, scheduled.num_spec_tokens_to_schedule]) + "\n")
        return super().execute_model(scheduled, *args, **kwargs)


if __name__ == "__main__":
    serve.WORKER = "ranked_server.RankedWorker"
    sys.exit(serve.main(sys.argv[2:]))  # argv[1] is "serve"
