//! The memory store passes the suite.

use onlyonce_conformance::MemoryHarness;

onlyonce_conformance::suite!(MemoryHarness::new());
onlyonce_conformance::inspect_suite!(MemoryHarness::new());
