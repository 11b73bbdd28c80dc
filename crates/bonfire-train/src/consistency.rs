//! Whether ranks still have the same model: a hash of each parameter's bits, compared over ranks.

use std::collections::HashMap;

use bonfire_collectives::{Buffer, BufferMut, Communicator};
use burn::{module::Module, tensor::backend::Backend};

use crate::{TrainError, parameters};

/// Makes sure that all trained parameters are bitwise equal on all ranks, in one collective of 8 bytes a parameter.
///
/// Buffers that are not trained may differ: running statistics are each rank's own if it wants so.
///
/// # Errors
///
/// [`TrainError::Drifted`] on every rank, naming the first parameter that differs and the ranks whose values are not
/// those of most; [`TrainError::Read`] if a tensor cannot be read, [`TrainError::Collective`] if the ranks do not come
/// together.
pub fn check_consistency<B: Backend, M: Module<B>>(
    communicator: &dyn Communicator,
    model: &M,
    num_windows: u64,
) -> Result<(), TrainError> {
    let (rank, world_size) = (communicator.rank(), communicator.world_size());
    let list: Vec<_> = parameters::parameters::<B, M>(model);
    let mut own = Vec::with_capacity(list.len());
    let mut problem = None;
    let mut index = 0;
    parameters::visit(model, |name, _, value: parameters::Value<'_, B>| {
        if list[index].is_trained {
            match value.into_data() {
                Ok(data) => own.push(fingerprint(&data.bytes)),
                Err(reason) => {
                    problem.get_or_insert_with(|| TrainError::Read { parameter: name.join("."), reason });
                }
            }
        }
        index += 1;
    });
    if let Some(problem) = problem {
        return Err(problem);
    }
    let mut all = vec![0; own.len() * world_size];
    let lengths = vec![own.len(); world_size];
    communicator.all_gather(Buffer::from_slice(&own), &lengths, BufferMut::from_slice(&mut all))?;
    let trained = list.iter().filter(|parameter| parameter.is_trained);
    for (index, parameter) in trained.enumerate() {
        let hashes: Vec<u64> = (0..world_size).map(|rank| all[rank * own.len() + index]).collect();
        let drifted = outsiders(&hashes);
        if !drifted.is_empty() {
            let parameter = parameter.name.clone();
            return Err(TrainError::Drifted { rank, world_size, num_windows, parameter, drifted });
        }
    }
    Ok(())
}

/// The ranks whose hash is not that of most; of several equally common hashes the lowest rank's counts.
fn outsiders(hashes: &[u64]) -> Vec<usize> {
    let mut counts = HashMap::new();
    for &hash in hashes {
        *counts.entry(hash).or_insert(0) += 1;
    }
    let most = counts.values().max().copied().unwrap_or(0);
    let Some(common) = hashes.iter().find(|hash| counts[hash] == most) else { return Vec::new() };
    (0..hashes.len()).filter(|&rank| hashes[rank] != *common).collect()
}

/// A number that tells bytes apart, the same on every machine; not against forgery.
///
/// Four lanes of 8 bytes, each multiplied and rotated, so that it runs at the speed of memory.
///
/// Source: the lanes and their mixing follow xxHash64 (Y. Collet, 2014, <https://xxhash.com>) with its first two
/// primes; the end is the finaliser of `MurmurHash3` (A. Appleby, 2011).
pub(crate) fn fingerprint(bytes: &[u8]) -> u64 {
    const FIRST: u64 = 0x9E37_79B1_85EB_CA87;
    const SECOND: u64 = 0xC2B2_AE3D_27D4_EB4F;
    let mix = |lane: u64, word: u64| lane.wrapping_add(word.wrapping_mul(SECOND)).rotate_left(31).wrapping_mul(FIRST);
    let mut lanes = [1u64, 2, 3, 4];
    let (blocks, rest) = bytes.as_chunks::<32>();
    for block in blocks {
        for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<8>().0) {
            *lane = mix(*lane, u64::from_le_bytes(*word));
        }
    }
    let mut hash = lanes.into_iter().fold(bytes.len() as u64, mix);
    for &byte in rest {
        hash = mix(hash, u64::from(byte));
    }
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_are_not_like_most_are_outsiders() {
        assert_eq!(outsiders(&[7]), [0; 0]);
        assert_eq!(outsiders(&[7, 7, 7]), [0; 0]);
        assert_eq!(outsiders(&[1, 7, 7]), [0]);
        assert_eq!(outsiders(&[7, 1, 7, 2]), [1, 3]);
        assert_eq!(outsiders(&[7, 1]), [1], "of two, the second is named");
    }

    #[test]
    fn one_bit_anywhere_changes_the_fingerprint() {
        for length in [0, 1, 8, 31, 32, 33, 100] {
            let mut bytes: Vec<u8> = (0..length).collect();
            let mut seen = std::collections::HashSet::from([fingerprint(&bytes)]);
            for bit in 0..usize::from(length) * 8 {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert!(seen.insert(fingerprint(&bytes)), "bit {bit} of {length} bytes");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            bytes.push(0);
            assert!(seen.insert(fingerprint(&bytes)), "a zero after {length} bytes");
        }
    }
}
