//! What ranks show each other before they exchange data, and what must be equal on all of them.

use core::fmt;

use crate::{Collective, DType, ReduceOp, cursor::Cursor, fingerprint::fingerprint};

/// One rank's part of a call, its buffers aside.
#[derive(Debug, Clone)]
pub(super) struct Terms<'a> {
    pub(super) collective: Collective,
    pub(super) op: Option<ReduceOp>,
    /// The root of a broadcast, the other rank of a send or recv.
    pub(super) other: Option<usize>,
    /// Elements per rank, of a reduce_scatter or all_gather.
    pub(super) lengths: &'a [usize],
    /// Dtype and elements of the buffers that are alike on every rank.
    pub(super) shapes: Vec<(DType, usize)>,
}

impl Terms<'_> {
    /// A collective with nothing in it.
    pub(super) const fn of(collective: Collective) -> Self {
        Self { collective, op: None, other: None, lengths: &[], shapes: Vec::new() }
    }
}

/// The first bytes of the first message between two ranks in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) claim: Claim,
    num_buffers: u64,
    first: Option<(DType, u64)>,
    num_bytes: u64,
    shapes: u64,
    lengths: u64,
    /// Calls that the rank had made with this one.
    pub(super) num_calls: u64,
}

/// What a rank wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) collective: Collective,
    pub(super) op: Option<ReduceOp>,
    pub(super) other: Option<u32>,
}

/// Changes with every change of what ranks send.
const VERSION: u8 = 2;
const NONE: u8 = u8::MAX;

impl Claim {
    pub(super) const NUM_BYTES: usize = 6;

    pub(super) fn encode(self) -> [u8; Self::NUM_BYTES] {
        let mut bytes = [self.collective as u8, self.op.map_or(NONE, |op| op as u8), 0, 0, 0, 0];
        bytes[2..].copy_from_slice(&self.other.unwrap_or(u32::MAX).to_le_bytes());
        bytes
    }

    pub(super) fn decode(cursor: &mut Cursor<'_>) -> Option<Self> {
        let collective = *Collective::ALL.get(usize::from(cursor.u8()?))?;
        let op = match cursor.u8()? {
            NONE => None,
            op => Some(*ReduceOp::ALL.get(usize::from(op))?),
        };
        let other = Some(cursor.u32()?).filter(|&other| other != u32::MAX);
        Some(Self { collective, op, other })
    }

    /// Whether this call of `rank` and `theirs` are the two halves of one transfer.
    pub(super) fn completes(self, rank: usize, theirs: Self) -> bool {
        let halves = (self.collective, theirs.collective);
        matches!(halves, (Collective::Send, Collective::Recv) | (Collective::Recv, Collective::Send))
            && theirs.other == u32::try_from(rank).ok()
    }

    /// Whether a call of `rank` that meets a call with these claims can never happen, whatever others do.
    pub(super) fn cannot_meet(self, rank: usize, theirs: Self) -> bool {
        if self.collective.is_point_to_point() {
            !self.completes(rank, theirs)
        } else {
            theirs.collective.is_point_to_point()
        }
    }
}

impl Header {
    pub(super) const NUM_BYTES: usize = 64;

    pub(super) fn new(terms: &Terms<'_>, num_calls: u64) -> Self {
        let Terms { collective, op, other, lengths, shapes } = terms;
        let num_bytes: usize = shapes.iter().map(|&(dtype, length)| dtype.size_bytes() * length).sum();
        Self {
            claim: Claim { collective: *collective, op: *op, other: other.map(|rank| rank as u32) },
            num_buffers: shapes.len() as u64,
            first: shapes.first().map(|&(dtype, length)| (dtype, length as u64)),
            num_bytes: num_bytes as u64,
            // Of one buffer the header says everything.
            shapes: if shapes.len() < 2 { 0 } else { fingerprint(&encode_shapes(shapes)) },
            lengths: if lengths.is_empty() { 0 } else { fingerprint(&encode_lengths(lengths)) },
            num_calls,
        }
    }

    pub(super) fn encode(&self) -> [u8; Self::NUM_BYTES] {
        let mut bytes = [0; Self::NUM_BYTES];
        bytes[0] = VERSION;
        bytes[1] = self.first.map_or(NONE, |(dtype, _)| dtype as u8);
        bytes[2..8].copy_from_slice(&self.claim.encode());
        let length = self.first.map_or(0, |(_, length)| length);
        let numbers = [self.num_buffers, length, self.num_bytes, self.shapes, self.lengths, self.num_calls];
        for (index, number) in numbers.into_iter().enumerate() {
            bytes[8 + 8 * index..][..8].copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// The header at the start of a message, if it is one of this version.
    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let mut cursor = Cursor::new(message.get(..Self::NUM_BYTES)?);
        if cursor.u8()? != VERSION {
            return None;
        }
        let dtype = match cursor.u8()? {
            NONE => None,
            code => Some(*DType::ALL.get(usize::from(code))?),
        };
        let claim = Claim::decode(&mut cursor)?;
        let mut number = || cursor.u64();
        let (num_buffers, length, num_bytes) = (number()?, number()?, number()?);
        let (shapes, lengths, num_calls) = (number()?, number()?, number()?);
        let first = dtype.map(|dtype| (dtype, length));
        Some(Self { claim, num_buffers, first, num_bytes, shapes, lengths, num_calls })
    }

    /// Whether two ranks want one and the same collective.
    fn agrees(&self, other: &Self) -> bool {
        self.claim == other.claim && self.lengths == other.lengths && self.has_shapes_of(other)
    }

    /// Whether the buffers of two ranks are alike.
    pub(super) fn has_shapes_of(&self, other: &Self) -> bool {
        let shapes = |header: &Self| (header.num_buffers, header.first, header.num_bytes, header.shapes);
        shapes(self) == shapes(other)
    }

    /// The buffer of a transfer.
    pub(super) fn describe_buffer(&self) -> String {
        self.first.map_or_else(|| "no buffer".into(), |shape| describe(shape, 0, 1))
    }
}

/// The lowest rank that differs from most, and the lowest of those that agree; nothing if all agree.
pub(super) fn odd_one_out(headers: &[Header]) -> Option<(usize, usize)> {
    if headers.iter().all(|header| header.agrees(&headers[0])) {
        return None;
    }
    let num_agreeing = |&with: &usize| headers.iter().filter(|header| header.agrees(&headers[with])).count();
    // Of equals, `max_by_key` gives the last.
    let reference = (0..headers.len()).rev().max_by_key(num_agreeing).unwrap_or(0);
    let differing = (0..headers.len()).find(|&rank| !headers[rank].agrees(&headers[reference]));
    differing.map(|differing| (differing, reference))
}

/// Lengths and shapes, as far as they are shown where ranks differ.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Description {
    lengths: Vec<u64>,
    shapes: Vec<(DType, u64)>,
}

impl Description {
    const MAX_ENTRIES: usize = 256;
    pub(super) const MAX_BYTES: usize = 4 + Self::MAX_ENTRIES * (8 + 9);

    pub(super) fn encode(terms: &Terms<'_>) -> Vec<u8> {
        let lengths = &terms.lengths[..terms.lengths.len().min(Self::MAX_ENTRIES)];
        let shapes = &terms.shapes[..terms.shapes.len().min(Self::MAX_ENTRIES)];
        let mut bytes = Vec::from((lengths.len() as u32).to_le_bytes());
        bytes.extend(encode_lengths(lengths));
        bytes.extend(encode_shapes(shapes));
        bytes
    }

    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let mut cursor = Cursor::new(message);
        let num_lengths = (cursor.u32()? as usize).min(Self::MAX_ENTRIES);
        let lengths = (0..num_lengths).map(|_| cursor.u64()).collect::<Option<_>>()?;
        let mut shapes = Vec::new();
        while !cursor.is_empty() {
            shapes.push((*DType::ALL.get(usize::from(cursor.u8()?))?, cursor.u64()?));
        }
        Some(Self { lengths, shapes })
    }
}

/// What two ranks that do not agree say where they first differ.
pub(super) fn difference(
    (given, of_given): (&Header, &Description),
    (expected, of_expected): (&Header, &Description),
) -> (String, String) {
    if given.claim != expected.claim {
        return (given.claim.to_string(), expected.claim.to_string());
    }
    if given.lengths != expected.lengths {
        return (format!("lengths {:?}", of_given.lengths), format!("lengths {:?}", of_expected.lengths));
    }
    let (num_given, num_expected) = (given.num_buffers, expected.num_buffers);
    if num_given != num_expected {
        return (format!("a list of {num_given} buffers"), format!("a list of {num_expected} buffers"));
    }
    let shapes = of_given.shapes.iter().zip(&of_expected.shapes).enumerate();
    match shapes.into_iter().find(|(_, (given, expected))| given != expected) {
        Some((index, (&given, &expected))) => (describe(given, index, num_given), describe(expected, index, num_given)),
        None => {
            let text = |header: &Header| format!("{} bytes in a list of {num_given} buffers", header.num_bytes);
            let (given, expected) = (text(given), text(expected));
            if given == expected { (format!("{given}, cut elsewhere"), expected) } else { (given, expected) }
        }
    }
}

fn describe((dtype, num_elements): (DType, u64), index: usize, num_buffers: u64) -> String {
    format!("{num_elements} {dtype} elements in buffer {index} of {num_buffers}")
}

fn encode_lengths(lengths: &[usize]) -> Vec<u8> {
    lengths.iter().flat_map(|&length| (length as u64).to_le_bytes()).collect()
}

fn encode_shapes(shapes: &[(DType, usize)]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(9 * shapes.len());
    for &(dtype, length) in shapes {
        bytes.push(dtype as u8);
        bytes.extend((length as u64).to_le_bytes());
    }
    bytes
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.collective)?;
        if let Some(op) = self.op {
            write!(f, " of {op}")?;
        }
        if let Some(other) = self.other {
            let role = match self.collective {
                Collective::Send => "to",
                Collective::Recv => "from",
                _ => "with root",
            };
            write!(f, " {role} {other}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(terms: &Terms<'_>) -> Header {
        Header::new(terms, 7)
    }

    fn sum(shapes: &[(DType, usize)]) -> Terms<'static> {
        Terms { op: Some(ReduceOp::Sum), shapes: shapes.to_vec(), ..Terms::of(Collective::AllReduce) }
    }

    #[test]
    fn codes_are_places_in_the_lists_of_all() {
        assert!(DType::ALL.iter().enumerate().all(|(index, &dtype)| dtype as usize == index));
        assert!(ReduceOp::ALL.iter().enumerate().all(|(index, &op)| op as usize == index));
        assert!(Collective::ALL.iter().enumerate().all(|(index, &collective)| collective as usize == index));
    }

    #[test]
    fn a_header_is_decoded_to_what_it_was() {
        let list = sum(&[(DType::F32, 3), (DType::BF16, 0)]);
        let recv = Terms { other: Some(3), shapes: vec![(DType::Bool, 1)], ..Terms::of(Collective::Recv) };
        for terms in [list, recv, Terms::of(Collective::Barrier)] {
            let header = header(&terms);
            assert_eq!(Header::decode(&header.encode()), Some(header));
            let description = Description::decode(&Description::encode(&terms)).expect("it is one");
            assert_eq!(description.shapes.len(), terms.shapes.len());
        }
    }

    #[test]
    fn the_rank_that_differs_from_most_is_named() {
        let (two, three) = (header(&sum(&[(DType::F32, 2)])), header(&sum(&[(DType::F32, 3)])));
        assert_eq!(odd_one_out(&[two, two, two]), None);
        assert_eq!(odd_one_out(&[three, two, two]), Some((0, 1)));
        assert_eq!(odd_one_out(&[two, two, three]), Some((2, 0)));
        assert_eq!(odd_one_out(&[two, two, three, three]), Some((2, 0)));
    }

    #[test]
    fn a_difference_names_the_first_buffer_that_differs() {
        let terms = [sum(&[(DType::F32, 2), (DType::F32, 4)]), sum(&[(DType::F32, 2), (DType::I32, 4)])];
        let of = |terms: &Terms<'_>| (header(terms), Description::decode(&Description::encode(terms)).unwrap());
        let (one, other) = (of(&terms[0]), of(&terms[1]));
        let texts = difference((&one.0, &one.1), (&other.0, &other.1));
        assert_eq!(texts, ("4 f32 elements in buffer 1 of 2".into(), "4 i32 elements in buffer 1 of 2".into()));
    }

    #[test]
    fn a_transfer_is_met_by_its_other_half_alone() {
        let claim = |collective, other| Claim { collective, op: None, other };
        let send = claim(Collective::Send, Some(1));
        assert!(!send.cannot_meet(0, claim(Collective::Recv, Some(0))));
        assert!(send.cannot_meet(0, claim(Collective::Recv, Some(2))));
        assert!(send.cannot_meet(0, claim(Collective::Send, Some(0))));
        assert!(send.cannot_meet(0, claim(Collective::Barrier, None)));
        assert!(claim(Collective::Barrier, None).cannot_meet(0, send));
        assert!(!claim(Collective::Barrier, None).cannot_meet(0, claim(Collective::Broadcast, Some(0))));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_header_or_none(bytes: Vec<u8>) {
            if let Some(header) = Header::decode(&bytes) {
                prop_assert_eq!(Header::decode(&header.encode()), Some(header));
            }
            let _ = Description::decode(&bytes);
        }
    }
}
