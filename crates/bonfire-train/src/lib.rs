//! Data-parallel training: each rank trains a copy of the model on its share of each batch, and all stay bitwise equal.
//!
//! ```text
//! batch -> split -> forward/backward -> accumulate -> bucket -> all-reduce -> clip -> optimizer
//! data/             step.rs             window.rs     bucket.rs  reducer.rs
//! ```

#![forbid(unsafe_code)]

mod consistency;
mod error;
mod parameters;

pub use consistency::check_consistency;
pub use error::TrainError;
pub use parameters::{Parameter, broadcast_parameters, compare_parameters, parameters};
