//! Ranks as entries of a `Vec`: a tensor as the parts that its placement gives them.

use bonfire_placement::{Lengths, PartialOp, Placement, Redistribution, redistribute};

use crate::dense::Dense;

/// One logical tensor: one part per rank, or the whole alone while it is `Local` or `Fill`.
pub(crate) struct Spread {
    pub(crate) placement: Placement,
    pub(crate) parts: Vec<Dense>,
}

impl Spread {
    /// Splits `whole`; the parts of a `Partial` are random multiples of `unit`.
    pub(crate) fn new(whole: &Dense, placement: &Placement, world_size: usize, unit: f64) -> Self {
        let parts = match placement {
            Placement::Local | Placement::Fill => vec![whole.clone()],
            Placement::Replicate => vec![whole.clone(); world_size],
            Placement::Shard { dim, lengths } => rows(whole, *dim, lengths),
            Placement::Partial { op } => partials(whole, *op, world_size, unit),
        };
        Spread { placement: placement.clone(), parts }
    }

    /// Moves the parts, if the crate says that they can be moved, in the way it says.
    pub(crate) fn redistribute(&self, to: &Placement, world_size: usize) -> Result<Self, String> {
        let way = redistribute(&self.placement, to).map_err(|error| error.to_string())?;
        let share = |whole: &Dense| match to {
            Placement::Shard { dim, lengths } => rows(whole, *dim, lengths),
            Placement::Replicate => vec![whole.clone(); world_size],
            Placement::Local | Placement::Fill | Placement::Partial { .. } => panic!("{way:?} to {to}"),
        };
        let parts = match (way, to) {
            (Redistribution::Keep, _) => self.parts.clone(),
            (Redistribution::Spread, _) => share(&self.parts[0]),
            // From its own copy, with no word from the others.
            (Redistribution::Slice, Placement::Shard { dim, lengths }) => {
                let own = |(rank, part): (usize, &Dense)| part.slice(*dim, lengths.range(rank));
                self.parts.iter().enumerate().map(own).collect()
            }
            (Redistribution::Slice, _) => return Err(format!("slice to {to}")),
            (Redistribution::AllGather | Redistribution::AllToAll, _) => share(&self.assemble()?),
            (Redistribution::AllReduce | Redistribution::ReduceScatter, _) => share(&self.assemble()?),
        };
        Ok(Spread { placement: to.clone(), parts })
    }

    /// The whole again.
    pub(crate) fn assemble(&self) -> Result<Dense, String> {
        let first = &self.parts[0];
        match &self.placement {
            Placement::Local | Placement::Fill => Ok(first.clone()),
            Placement::Replicate if self.parts.iter().any(|part| part != first) => {
                Err("replicated parts differ".to_owned())
            }
            Placement::Replicate => Ok(first.clone()),
            Placement::Shard { dim, .. } => Ok(Dense::concat(&self.parts, *dim)),
            Placement::Partial { op } => {
                Ok(Dense::elementwise(&self.parts, |values| values.iter().copied().reduce(combine(*op)).unwrap_or(0.0)))
            }
        }
    }
}

/// The value that changes nothing: what a rank without rows adds to a `Partial`.
pub(crate) fn identity(op: PartialOp) -> f64 {
    match op {
        PartialOp::Sum => 0.0,
        PartialOp::Max => f64::NEG_INFINITY,
        PartialOp::Min => f64::INFINITY,
    }
}

/// Deterministic random numbers (SplitMix64: Steele, Lea and Flood, 2014).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    /// From -4 to 4.
    pub(crate) fn small(&mut self) -> f64 {
        self.below(9) as f64 - 4.0
    }
}

fn rows(whole: &Dense, dim: usize, lengths: &Lengths) -> Vec<Dense> {
    (0..lengths.world_size()).map(|rank| whole.slice(dim, lengths.range(rank))).collect()
}

fn combine(op: PartialOp) -> fn(f64, f64) -> f64 {
    match op {
        PartialOp::Sum => |a, b| a + b,
        PartialOp::Max => f64::max,
        PartialOp::Min => f64::min,
    }
}

fn partials(whole: &Dense, op: PartialOp, world_size: usize, unit: f64) -> Vec<Dense> {
    let mut random = Random(world_size as u64);
    let beyond = match op {
        PartialOp::Sum => {
            // Noise on all ranks but one, which makes up the difference.
            let mut noise = || Dense::from_fn(&whole.shape, |_| random.small() * unit);
            let mut parts = vec![whole.clone()];
            parts.extend((1..world_size).map(|_| noise()));
            parts[0] = Dense::elementwise(&parts, |values| values[0] - values[1..].iter().sum::<f64>());
            return parts;
        }
        PartialOp::Max => -unit,
        PartialOp::Min => unit,
    };
    // Each element sits on one rank; the others hold less (or more).
    let owners = Dense::from_fn(&whole.shape, |_| random.below(world_size) as f64);
    let part = |rank: usize| {
        Dense::elementwise(&[whole.clone(), owners.clone()], |values| {
            values[0] + if values[1] == rank as f64 { 0.0 } else { beyond * (rank + 1) as f64 }
        })
    };
    (0..world_size).map(part).collect()
}
