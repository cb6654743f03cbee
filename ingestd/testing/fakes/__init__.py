"""In-memory implementations of the ports; the same contract suites test the real ones.

Public:

- `capture`: `FakeCapture`, `FakeDatabase`, `FakeChange`, `FakeTransaction`;
- `snapshot`: `FakeSnapshot`, `Reach`;
- `connector`: `FakeFactory`, `FakeConnector`, `FakeSettings`;
- `tables`: `FakeTables`, `FakeMetadata`, `FakeSplitManager`, `FakePageSource`;
- `sink`: `MemoryLake`, `MemoryDisk`, `MemoryTable`, `MemoryEpochWriter`, `MemoryPageSink`;
- `reference`: `FakeReferenceTable`, `FakeReferenceTableSource`, `FakeReferenceLake`,
  `FakeReferenceSink`;
- `pause`: `FakePauseMark`.

`database` and `rows` are their parts. The ports of maintenance and of verification have no fake.
"""
