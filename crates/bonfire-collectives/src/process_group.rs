//! All ranks of a run, as one process sees them.

mod error;

pub use error::ProcessGroupError;
