//! What ranks tell each other beside their messages.

use std::{sync::Arc, time::Duration};

use super::header::Claim;
use crate::{
    Collective, CollectiveError, DType, MAX_NOTICE_BYTES, ReduceOp,
    broken::Break,
    cursor::{Cursor, put_bytes},
};

/// A short word to another rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Notice {
    /// The group is broken.
    Broken(Break),
    /// This rank gives up its communicator.
    Ended { num_calls: u64, panicked: bool },
    /// Ranks of which each waits for the next in a transfer, the last one for the rank that gets this.
    Waiting(Vec<Link>),
}

/// A rank that waits for another, and in what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) rank: u32,
    pub(super) claim: Claim,
    /// Calls that the rank had made with this one.
    pub(super) num_calls: u64,
}

/// A longer text is cut, so that a notice stays short.
const MAX_TEXT_BYTES: usize = 1024;
/// Ranks that a notice names.
const MAX_RANKS: usize = 512;
/// Ranks of which one waits for the next; a longer ring is found by none, and ends with the timeout.
const MAX_LINKS: usize = 400;

/// Names of arguments, which are static texts: they cross as places in this list.
const ARGUMENTS: &[&str] = &[
    "argument",
    "dtypes (one a buffer)",
    "lengths (ranks)",
    "input (elements)",
    "output (elements)",
    "root",
    "to",
    "from",
];

impl Notice {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::Broken(Break { cause, concerned }) => {
                bytes.push(0);
                put_ranks(&mut bytes, concerned);
                put_error(&mut bytes, cause);
            }
            Self::Ended { num_calls, panicked } => {
                bytes.push(1);
                bytes.extend(num_calls.to_le_bytes());
                bytes.push(u8::from(*panicked));
            }
            Self::Waiting(links) => {
                bytes.push(2);
                for link in links.iter().take(MAX_LINKS) {
                    bytes.extend(link.rank.to_le_bytes());
                    bytes.extend(link.claim.encode());
                    bytes.extend(link.num_calls.to_le_bytes());
                }
            }
        }
        debug_assert!(bytes.len() <= MAX_NOTICE_BYTES, "a notice is short");
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut cursor = Cursor::new(bytes);
        let notice = match cursor.u8()? {
            0 => {
                let concerned = ranks(&mut cursor)?;
                Self::Broken(Break { concerned, cause: Arc::new(error(&mut cursor)?) })
            }
            1 => Self::Ended { num_calls: cursor.u64()?, panicked: cursor.u8()? != 0 },
            2 => {
                let mut links = Vec::new();
                while !cursor.is_empty() {
                    let (rank, claim) = (cursor.u32()?, Claim::decode(&mut cursor)?);
                    links.push(Link { rank, claim, num_calls: cursor.u64()? });
                }
                Self::Waiting(links)
            }
            _ => return None,
        };
        cursor.is_empty().then_some(notice)
    }
}

fn put_error(bytes: &mut Vec<u8>, error: &CollectiveError) {
    let start = bytes.len();
    bytes.push(0);
    let kind = match error {
        CollectiveError::Timeout { rank, world_size, collective, waited, missing } => {
            put_call(bytes, *rank, *world_size, *collective);
            put_number(bytes, u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX));
            put_ranks(bytes, missing);
            0
        }
        CollectiveError::Mismatch { rank, world_size, collective, differing, reference, given, expected } => {
            put_call(bytes, *rank, *world_size, *collective);
            put_number(bytes, *differing as u64);
            put_number(bytes, *reference as u64);
            put_text(bytes, given);
            put_text(bytes, expected);
            1
        }
        CollectiveError::RankEnded { rank, world_size, num_calls, panicked } => {
            put_call(bytes, *rank, *world_size, Collective::Barrier);
            put_number(bytes, *num_calls);
            bytes.push(u8::from(*panicked));
            2
        }
        CollectiveError::Aborted { rank, world_size, reason } => {
            put_call(bytes, *rank, *world_size, Collective::Barrier);
            put_text(bytes, reason);
            3
        }
        CollectiveError::UnsupportedReduction { rank, world_size, collective, op, dtype } => {
            put_call(bytes, *rank, *world_size, *collective);
            bytes.extend([*op as u8, *dtype as u8]);
            4
        }
        CollectiveError::WrongLength { rank, world_size, collective, argument, actual, expected } => {
            put_call(bytes, *rank, *world_size, *collective);
            put_argument(bytes, argument);
            put_number(bytes, *actual as u64);
            put_number(bytes, *expected as u64);
            5
        }
        CollectiveError::WrongDType { rank, world_size, collective, input, output } => {
            put_call(bytes, *rank, *world_size, *collective);
            bytes.extend([*input as u8, *output as u8]);
            6
        }
        CollectiveError::WrongRank { rank, world_size, collective, argument, value } => {
            put_call(bytes, *rank, *world_size, *collective);
            put_argument(bytes, argument);
            put_number(bytes, *value as u64);
            7
        }
        CollectiveError::ConnectionFailed { rank, world_size, other, reason } => {
            put_call(bytes, *rank, *world_size, Collective::Barrier);
            put_number(bytes, *other as u64);
            put_text(bytes, reason);
            8
        }
        CollectiveError::PartialElement { dtype, num_bytes } => {
            bytes.push(*dtype as u8);
            put_number(bytes, *num_bytes as u64);
            9
        }
        // A cause has no cause of its own.
        CollectiveError::Broken { cause, .. } => {
            bytes.truncate(start);
            return put_error(bytes, cause);
        }
    };
    bytes[start] = kind;
}

fn error(cursor: &mut Cursor<'_>) -> Option<CollectiveError> {
    let kind = cursor.u8()?;
    if kind == 9 {
        return Some(CollectiveError::PartialElement { dtype: dtype(cursor)?, num_bytes: number(cursor)? });
    }
    let (rank, world_size) = (number(cursor)?, number(cursor)?);
    let collective = *Collective::ALL.get(usize::from(cursor.u8()?))?;
    Some(match kind {
        0 => {
            let waited = Duration::from_nanos(cursor.u64()?);
            CollectiveError::Timeout { rank, world_size, collective, waited, missing: ranks(cursor)? }
        }
        1 => {
            let (differing, reference) = (number(cursor)?, number(cursor)?);
            let (given, expected) = (cursor.text()?, cursor.text()?);
            CollectiveError::Mismatch { rank, world_size, collective, differing, reference, given, expected }
        }
        2 => CollectiveError::RankEnded { rank, world_size, num_calls: cursor.u64()?, panicked: cursor.u8()? != 0 },
        3 => CollectiveError::Aborted { rank, world_size, reason: cursor.text()? },
        4 => {
            let op = *ReduceOp::ALL.get(usize::from(cursor.u8()?))?;
            CollectiveError::UnsupportedReduction { rank, world_size, collective, op, dtype: dtype(cursor)? }
        }
        5 => {
            let argument = argument(cursor)?;
            let (actual, expected) = (number(cursor)?, number(cursor)?);
            CollectiveError::WrongLength { rank, world_size, collective, argument, actual, expected }
        }
        6 => {
            let (input, output) = (dtype(cursor)?, dtype(cursor)?);
            CollectiveError::WrongDType { rank, world_size, collective, input, output }
        }
        7 => {
            let (argument, value) = (argument(cursor)?, number(cursor)?);
            CollectiveError::WrongRank { rank, world_size, collective, argument, value }
        }
        8 => {
            let (other, reason) = (number(cursor)?, cursor.text()?);
            CollectiveError::ConnectionFailed { rank, world_size, other, reason }
        }
        _ => return None,
    })
}

fn put_call(bytes: &mut Vec<u8>, rank: usize, world_size: usize, collective: Collective) {
    put_number(bytes, rank as u64);
    put_number(bytes, world_size as u64);
    bytes.push(collective as u8);
}

fn put_number(bytes: &mut Vec<u8>, number: u64) {
    bytes.extend(number.to_le_bytes());
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    put_bytes(bytes, &text.as_bytes()[..text.floor_char_boundary(MAX_TEXT_BYTES)]);
}

fn put_ranks(bytes: &mut Vec<u8>, ranks: &[usize]) {
    let ranks: Vec<u8> = ranks.iter().take(MAX_RANKS).flat_map(|&rank| (rank as u32).to_le_bytes()).collect();
    put_bytes(bytes, &ranks);
}

fn put_argument(bytes: &mut Vec<u8>, argument: &str) {
    let place = ARGUMENTS.iter().position(|&known| known == argument).unwrap_or(0);
    bytes.push(place as u8);
}

fn number(cursor: &mut Cursor<'_>) -> Option<usize> {
    usize::try_from(cursor.u64()?).ok()
}

fn dtype(cursor: &mut Cursor<'_>) -> Option<DType> {
    DType::ALL.get(usize::from(cursor.u8()?)).copied()
}

fn argument(cursor: &mut Cursor<'_>) -> Option<&'static str> {
    ARGUMENTS.get(usize::from(cursor.u8()?)).copied()
}

fn ranks(cursor: &mut Cursor<'_>) -> Option<Vec<usize>> {
    let (chunks, rest) = cursor.bytes()?.as_chunks();
    rest.is_empty().then(|| chunks.iter().map(|chunk| u32::from_le_bytes(*chunk) as usize).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn errors() -> Vec<CollectiveError> {
        let (rank, world_size, collective) = (1, 4, Collective::AllGather);
        vec![
            CollectiveError::Timeout {
                rank,
                world_size,
                collective,
                waited: Duration::from_millis(5),
                missing: vec![2],
            },
            CollectiveError::Mismatch {
                rank,
                world_size,
                collective,
                differing: 3,
                reference: 0,
                given: "a barrier".into(),
                expected: "a sum".into(),
            },
            CollectiveError::RankEnded { rank, world_size, num_calls: 9, panicked: true },
            CollectiveError::Aborted { rank, world_size, reason: "the loss is NaN".into() },
            CollectiveError::UnsupportedReduction {
                rank,
                world_size,
                collective,
                op: ReduceOp::Mean,
                dtype: DType::I8,
            },
            CollectiveError::WrongDType { rank, world_size, collective, input: DType::I8, output: DType::U8 },
            CollectiveError::WrongRank { rank, world_size, collective, argument: "root", value: 7 },
            CollectiveError::ConnectionFailed { rank, world_size, other: 2, reason: "no route".into() },
            CollectiveError::PartialElement { dtype: DType::F64, num_bytes: 3 },
        ]
    }

    #[test]
    fn causes_arrive_as_they_were() {
        for argument in ARGUMENTS {
            let (rank, world_size, collective) = (1, 4, Collective::ReduceScatter);
            let wrong = CollectiveError::WrongLength { rank, world_size, collective, argument, actual: 1, expected: 2 };
            for cause in errors().into_iter().chain([wrong]) {
                let notice = Notice::Broken(Break { cause: Arc::new(cause), concerned: vec![0, 3] });
                assert_eq!(Notice::decode(&notice.encode()), Some(notice));
            }
        }
        let claim = Claim { collective: Collective::Send, op: None, other: Some(2) };
        let waiting = Notice::Waiting(vec![Link { rank: 1, claim, num_calls: 7 }; 3]);
        for notice in [waiting, Notice::Ended { num_calls: 3, panicked: false }] {
            assert_eq!(Notice::decode(&notice.encode()), Some(notice));
        }
    }

    #[test]
    fn the_longest_notice_is_short() {
        let text = "é".repeat(5000);
        let (rank, world_size, collective) = (0, 5000, Collective::Send);
        let ranks: Vec<usize> = (0..5000).collect();
        let causes = [
            CollectiveError::Mismatch {
                rank,
                world_size,
                collective,
                differing: 1,
                reference: 0,
                given: text.clone(),
                expected: text,
            },
            CollectiveError::Timeout { rank, world_size, collective, waited: Duration::MAX, missing: ranks.clone() },
        ];
        for cause in causes {
            let notice = Notice::Broken(Break { cause: Arc::new(cause), concerned: ranks.clone() });
            assert!(notice.encode().len() <= MAX_NOTICE_BYTES);
        }
        let claim = Claim { collective: Collective::Send, op: None, other: Some(2) };
        assert!(Notice::Waiting(vec![Link { rank: 1, claim, num_calls: 7 }; 5000]).encode().len() <= MAX_NOTICE_BYTES);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_notice_or_none(bytes: Vec<u8>) {
            let _ = Notice::decode(&bytes);
        }
    }
}
