//! Onlyonce.
