//! What a new deposit leads to: a pure decision about the deposits that are there.

use super::{deposit::Deposit, round::Members};
use crate::{CollectiveError, call::Call};

/// What a deposit leads to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Others must come.
    Wait,
    /// All members are there and agree.
    Commit(Members),
    /// It cannot happen; the ranks concerned get the cause as their own error.
    Fail { cause: CollectiveError, concerned: Vec<usize> },
}

/// Decides about the deposit of `call.rank`; `deposits` gives those of ranks that wait, and that one.
pub(super) fn judge<'d>(
    call: Call,
    deposits: impl Fn(usize) -> Option<&'d Deposit<'d>>,
    ended: &[Option<u64>],
) -> Verdict {
    let Call { rank, world_size, .. } = call;
    let own = deposits(rank).expect("the rank has come");
    if let Some((partner, theirs)) = own.partner().and_then(|partner| Some((partner, deposits(partner)?)))
        && theirs.partner() == Some(rank)
        && own.completes(theirs)
    {
        return judge_pair(call, (rank, own), (partner, theirs));
    }
    if let Some(cause) = ended_partner(own, ended) {
        return Verdict::Fail { cause, concerned: Vec::new() };
    }
    if (0..world_size).any(|rank| deposits(rank).is_none()) {
        return Verdict::Wait;
    }
    // Everyone is there, so a transfer that could happen would have: whoever asks for one waits in vain.
    let deposit = |rank: usize| deposits(rank).expect("all ranks have come");
    let agree = |rank: usize, with: usize| deposit(rank).difference(deposit(with)).is_none();
    if own.partner().is_none() && (0..world_size).all(|rank| agree(rank, 0)) {
        return Verdict::Commit(Members::All);
    }
    let num_agreeing = |&with: &usize| (0..world_size).filter(|&rank| agree(rank, with)).count();
    // The lowest of those that most agree with: of equals, `max_by_key` gives the last.
    let reference = (0..world_size).rev().max_by_key(num_agreeing).unwrap_or(0);
    let difference = |rank: usize| Some((rank, deposit(rank).difference(deposit(reference))?));
    let (differing, texts) =
        (0..world_size).find_map(difference).expect("a rank is not its own partner, so transfers differ");
    mismatch(call, Members::All, (differing, reference), texts)
}

/// Why a deposit waits in vain: a rank it needs has ended.
pub(super) fn ended_partner(deposit: &Deposit<'_>, ended: &[Option<u64>]) -> Option<CollectiveError> {
    let gone = |rank: usize| {
        let num_calls = ended[rank]?;
        Some(CollectiveError::RankEnded { rank, world_size: ended.len(), num_calls, panicked: false })
    };
    match deposit.partner() {
        Some(partner) => gone(partner),
        None => (0..ended.len()).find_map(gone),
    }
}

fn judge_pair(call: Call, own: (usize, &Deposit<'_>), theirs: (usize, &Deposit<'_>)) -> Verdict {
    let members = Members::Pair(own.0, theirs.0);
    let (low, high) = if own.0 < theirs.0 { (own, theirs) } else { (theirs, own) };
    match high.1.buffer_difference(low.1) {
        None => Verdict::Commit(members),
        Some(texts) => mismatch(call, members, (high.0, low.0), texts),
    }
}

fn mismatch(
    call: Call,
    members: Members,
    (differing, reference): (usize, usize),
    (given, expected): (String, String),
) -> Verdict {
    let Call { rank, world_size, collective } = call;
    let concerned = members.iter(world_size).collect();
    let cause = CollectiveError::Mismatch { rank, world_size, collective, differing, reference, given, expected };
    Verdict::Fail { cause, concerned }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buffer, BufferMut, Collective, ReduceOp};

    /// The verdict on the deposit of the last rank that has come.
    fn last_of(deposits: &[Option<&Deposit<'_>>], ended: &[Option<u64>]) -> Verdict {
        let rank = deposits.iter().rposition(Option::is_some).unwrap();
        let collective = deposits[rank].unwrap().collective;
        let call = Call { rank, world_size: deposits.len(), collective };
        judge(call, |rank| deposits[rank], ended)
    }

    fn send(to: usize) -> Deposit<'static> {
        let inputs = &[const { Buffer::EMPTY }];
        Deposit { other: Some(to), inputs, ..Deposit::of(Collective::Send) }
    }

    fn differing(verdict: &Verdict) -> Option<(usize, usize)> {
        match verdict {
            Verdict::Fail { cause: CollectiveError::Mismatch { differing, reference, .. }, .. } => {
                Some((*differing, *reference))
            }
            _ => None,
        }
    }

    #[test]
    fn a_collective_waits_for_the_last_rank() {
        let barrier = Deposit::of(Collective::Barrier);
        assert_eq!(last_of(&[Some(&barrier), None, Some(&barrier)], &[None; 3]), Verdict::Wait);
        assert_eq!(last_of(&[Some(&barrier); 3], &[None; 3]), Verdict::Commit(Members::All));
        assert_eq!(last_of(&[Some(&barrier)], &[None]), Verdict::Commit(Members::All));
    }

    #[test]
    fn the_rank_that_differs_from_most_is_named() {
        let (barrier, exchange) = (Deposit::of(Collective::Barrier), Deposit::of(Collective::Exchange));
        let verdict = |odd: usize| {
            let deposits: Vec<_> = (0..4).map(|rank| Some(if rank == odd { &exchange } else { &barrier })).collect();
            last_of(&deposits, &[None; 4])
        };
        for (odd, reference) in [(0, 1), (1, 0), (3, 0)] {
            assert_eq!(differing(&verdict(odd)), Some((odd, reference)));
        }
        // Two against two: the lower ranks are taken for right.
        let halves = [Some(&exchange), Some(&exchange), Some(&barrier), Some(&barrier)];
        assert_eq!(differing(&last_of(&halves, &[None; 4])), Some((2, 0)));
    }

    #[test]
    fn a_transfer_is_committed_by_its_two_ranks_alone() {
        let (mut a, mut b) = ([0f32; 2], [0i32; 2]);
        let outputs = &[BufferMut::from_slice(&mut a)];
        let recv = Deposit { other: Some(0), outputs, ..Deposit::of(Collective::Recv) };
        let inputs = &[Buffer::from_slice(&[1f32; 2])];
        let send_two = Deposit { other: Some(2), inputs, ..Deposit::of(Collective::Send) };
        assert_eq!(last_of(&[Some(&send_two), None, Some(&recv)], &[None; 3]), Verdict::Commit(Members::Pair(2, 0)));
        // The other rank has ended meanwhile; nobody needs it.
        let ended = [None, Some(5), None];
        assert_eq!(last_of(&[Some(&send_two), None, Some(&recv)], &ended), Verdict::Commit(Members::Pair(2, 0)));
        let outputs = &[BufferMut::from_slice(&mut b)];
        let wrong = Deposit { other: Some(0), outputs, ..Deposit::of(Collective::Recv) };
        let verdict = last_of(&[Some(&send_two), None, Some(&wrong)], &[None; 3]);
        assert!(matches!(&verdict, Verdict::Fail { concerned, .. } if *concerned == [0, 2]));
        assert_eq!(differing(&verdict), Some((2, 0)));
    }

    #[test]
    fn ranks_that_all_send_wait_in_vain() {
        assert!(differing(&last_of(&[Some(&send(1)), Some(&send(0))], &[None; 2])).is_some());
        assert!(differing(&last_of(&[Some(&send(1)), Some(&send(2)), Some(&send(1))], &[None; 3])).is_some());
        let barrier = Deposit::of(Collective::Barrier);
        assert!(differing(&last_of(&[Some(&barrier), Some(&send(0))], &[None; 2])).is_some());
        assert_eq!(last_of(&[Some(&send(2)), None, None], &[None; 3]), Verdict::Wait);
    }

    #[test]
    fn whoever_needs_a_rank_that_ended_fails() {
        let sum = Deposit { op: Some(ReduceOp::Sum), ..Deposit::of(Collective::AllReduce) };
        let ended = [None, Some(5), None];
        let cause = CollectiveError::RankEnded { rank: 1, world_size: 3, num_calls: 5, panicked: false };
        let fail = Verdict::Fail { cause, concerned: Vec::new() };
        assert_eq!(last_of(&[Some(&sum), None, None], &ended), fail);
        assert_eq!(last_of(&[Some(&send(1)), None, None], &ended), fail);
        assert_eq!(last_of(&[Some(&send(2)), None, None], &ended), Verdict::Wait);
    }
}
