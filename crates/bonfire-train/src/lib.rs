//! Data-parallel training: each rank trains a copy of the model on its share of each batch, and all stay bitwise equal.
//!
//! ```text
//! batch -> split -> forward/backward -> accumulate -> bucket -> all-reduce -> clip -> optimizer
//! data/             step.rs             window.rs     bucket.rs  reducer.rs
//! ```

#![forbid(unsafe_code)]

mod error;

pub use error::TrainError;
