//! Where the parts of a tensor sit: placements, shares, and the rules that say how an op moves them.
//!
//! ```text
//! op family + placements and shapes of its inputs -> Op::plan -> Plan -> redistribute each input -> run on each rank
//! ```
//!
//! Everything here is pure: no device, no data, no threads. A rule may change how fast an op runs, never what it gives.
//!
//! | placement | meaning |
//! |---|---|
//! | [`Placement::Local`] | a plain tensor on the home device, not spread yet |
//! | [`Placement::Fill`] | one value everywhere: no storage, takes any placement for free |
//! | [`Placement::Replicate`] | every rank holds the whole value |
//! | [`Placement::Shard`] | rank `r` holds `lengths.of(r)` rows of `dim`; lengths may differ and may be 0 |
//! | [`Placement::Partial`] | the value is the sum (or max, or min) of the ranks' tensors |
//!
//! # A step of data parallel training
//!
//! ```
//! use bonfire_placement::{Op, Operand, PartialOp, Placement, Redistribution, Role, Shares, Yield, redistribute};
//!
//! // A batch of 9 rows of 3 features, fresh from the host, meets a weight `[3, 5]` on 4 ranks.
//! let (shares, world_size) = (Shares::Equal, 4);
//! let linear = Op::Batched { dims: vec![0], roles: vec![Role::Split, Role::Whole], outputs: vec![Yield::Split] };
//! let forward = linear.plan(
//!     &[Operand { placement: &Placement::Local, shape: &[9, 3] }, Operand { placement: &Placement::Local, shape: &[3, 5] }],
//!     &shares,
//!     world_size,
//! )?;
//! let batch = Placement::shard(0, [3, 2, 2, 2]);
//! assert_eq!(forward.inputs, [batch.clone(), Placement::Replicate]);
//! assert_eq!(forward.outputs, [batch.clone()]);
//! assert_eq!(redistribute(&Placement::Local, &forward.inputs[0])?, Redistribution::Spread);
//!
//! // The weight gradient `x^T dy` contracts the batch: each rank gives its part of a sum.
//! let backward = Op::Matmul.plan(
//!     &[
//!         Operand { placement: &Placement::shard(1, [3, 2, 2, 2]), shape: &[3, 9] },
//!         Operand { placement: &batch, shape: &[9, 5] },
//!     ],
//!     &shares,
//!     world_size,
//! )?;
//! assert_eq!(backward.outputs, [Placement::Partial { op: PartialOp::Sum }]);
//! assert_eq!(redistribute(&backward.outputs[0], &Placement::Replicate)?, Redistribution::AllReduce);
//! # Ok::<(), bonfire_placement::PlacementError>(())
//! ```
//!
//! # Feature flags
//!
//! - `serde`: [`Shares`] and [`ShareSchedule`] can be read and written.

#![forbid(unsafe_code)]

mod balance;
mod error;
mod lengths;
mod placement;
mod redistribute;
mod rules;
mod schedule;

pub use balance::{MIN_GAIN, StepCost, balance, gain};
pub use error::PlacementError;
pub use lengths::{Lengths, Shares};
pub use placement::{PartialOp, Placement};
pub use redistribute::{Redistribution, redistribute};
pub use rules::{Cut, Op, Operand, Plan, Reduction, Role, Yield, reshape_stored};
pub use schedule::{ShareChange, ShareSchedule};
