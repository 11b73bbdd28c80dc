//! Random numbers that differ between ranks.

use bonfire_collectives::{BufferMut, Communicator};
use burn::tensor::{Device, Distribution, Tensor, backend::Backend};

use crate::TrainError;

/// What the seeds of all ranks come from.
///
/// Ranks that are processes and were seeded alike, as they must be for equal initial weights, would draw the same dropout
/// masks. With this each rank and epoch has random numbers of its own, which a run with the same seed draws again, and so
/// does one that goes on from the start of an epoch.
///
/// Ranks that are threads often share one generator of the process, from which they draw in no certain order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankSeed {
    base: u64,
    rank: usize,
}

impl RankSeed {
    /// Takes the seed from rank 0's next random numbers, so that it depends on what that was seeded with.
    ///
    /// # Errors
    ///
    /// [`TrainError::Read`] if they cannot be read, [`TrainError::Collective`] if the ranks do not come together.
    pub fn agree<B: Backend>(communicator: &dyn Communicator, device: &Device<B>) -> Result<Self, TrainError> {
        let drawn = Tensor::<B, 1>::random([4], Distribution::Uniform(0.0, 1.0), device);
        let drawn = drawn.try_into_data().map_err(|error| {
            communicator.abort("random numbers cannot be read");
            TrainError::Read { parameter: "random numbers".into(), reason: format!("{error:?}") }
        })?;
        let mut base = [drawn.iter::<f32>().fold(0, |base, value| mix(base ^ u64::from(value.to_bits())))];
        communicator.broadcast(BufferMut::from_slice(&mut base), 0)?;
        Ok(Self { base: base[0], rank: communicator.rank() })
    }

    /// Seeds this rank's generator for an epoch, or whatever is counted.
    pub fn apply<B: Backend>(&self, device: &Device<B>, epoch: usize) {
        B::seed(device, self.of(epoch));
    }

    fn of(&self, epoch: usize) -> u64 {
        mix(mix(self.base ^ self.rank as u64) ^ epoch as u64)
    }
}

/// A permutation of all numbers without a pattern: splitmix64's. Source: Steele et al., Fast Splittable Pseudorandom Number
/// Generators, 2014.
const fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ranks_and_epochs_have_seeds_of_their_own() {
        let seeds: HashSet<u64> =
            (0..64).flat_map(|rank| (0..64).map(move |epoch| RankSeed { base: 7, rank }.of(epoch))).collect();
        assert_eq!(seeds.len(), 64 * 64);
    }
}
