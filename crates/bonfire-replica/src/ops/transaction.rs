use burn_backend::ops::TransactionOps;

use crate::{Member, Replica};

/// Reads one tensor after another, as Burn's default does: members read their parts side by side already.
impl<B: Member> TransactionOps<Self> for Replica<B> {}
