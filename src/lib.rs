//! Multi-device training for [Burn](https://burn.dev): several devices behave as one backend.

pub use bonfire_collectives as collectives;
pub use bonfire_placement as placement;
pub use bonfire_replica::*;
