//! One op on whole operands, and the same op as the rules spread it, for every placement of every operand.

use std::collections::HashMap;
use std::ops::Range;

use bonfire_placement::{Op, Operand, PartialOp, Placement, Plan, Shares};

use crate::dense::Dense;
use crate::ranks::{Random, Spread, identity};

/// What a rank computes from its parts.
type Kernel = Box<dyn Fn(&[Dense], &Held) -> Vec<Dense>>;

/// What a rank knows of its parts.
#[derive(Default)]
pub(crate) struct Held {
    /// The shapes that its outputs are to have; empty, if it need not know.
    outputs: Vec<Vec<usize>>,
    /// The dim of which the ranks share the first operand, and the rows that it holds of it.
    pub(crate) rows: Option<(usize, Range<usize>)>,
}

pub(crate) struct Case {
    pub(crate) op: Op,
    /// The operands' whole shapes.
    inputs: Vec<Vec<usize>>,
    /// The outputs' whole shapes, if the kernel must know them.
    outputs: Vec<Vec<usize>>,
    /// All values are multiples of it: a mean of this many is exact.
    unit: usize,
    kernel: Kernel,
}

/// What the plans of some cases came to, so that a test can tell that it has seen what it is about.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) num_replicate: usize,
    pub(crate) num_shard: usize,
    pub(crate) num_partial: usize,
}

impl Case {
    pub(crate) fn new(op: Op, inputs: &[&[usize]], kernel: impl Fn(&[Dense]) -> Vec<Dense> + 'static) -> Self {
        Case::placed(op, inputs, move |parts, _| kernel(parts))
    }

    /// An op whose ranks must know which rows they hold.
    pub(crate) fn placed(
        op: Op,
        inputs: &[&[usize]],
        kernel: impl Fn(&[Dense], &Held) -> Vec<Dense> + 'static,
    ) -> Self {
        Case {
            op,
            inputs: inputs.iter().map(|shape| shape.to_vec()).collect(),
            outputs: Vec::new(),
            unit: 1,
            kernel: Box::new(kernel),
        }
    }

    /// An op that is told its one output's shape, and on a rank the shape of its part.
    pub(crate) fn shaped(
        op: Op,
        from: &[usize],
        to: &[usize],
        kernel: impl Fn(&Dense, &[usize]) -> Dense + 'static,
    ) -> Self {
        Case {
            op,
            inputs: vec![from.to_vec()],
            outputs: vec![to.to_vec()],
            unit: 1,
            kernel: Box::new(move |parts, held| vec![kernel(&parts[0], &held.outputs[0])]),
        }
    }

    pub(crate) fn with_unit(self, unit: usize) -> Self {
        Case { unit, ..self }
    }

    /// Every placement of every operand on 1 to 4 ranks: the plan is well formed and gives what the whole op gives.
    pub(crate) fn check(&self) -> Seen {
        let mut seen = Seen::default();
        let mut whole_results = HashMap::new();
        for world_size in 1..=4 {
            let choices = self.inputs.iter().map(|shape| placements(shape, world_size, self.inputs.len()));
            for combination in product(choices) {
                for shares in shares(&combination, world_size) {
                    let plan = self.plan(&combination, &shares, world_size);
                    let verdict = self.verify(&combination, &plan, world_size, &mut whole_results);
                    if let Err(why) = verdict {
                        let (op, inputs) = (&self.op, &self.inputs);
                        panic!("{op:?} of {inputs:?}, {combination:?} on {world_size} ranks: {why}\n{plan:?}");
                    }
                    seen.count(&plan);
                }
            }
        }
        seen
    }

    fn plan(&self, given: &[Placement], shares: &Shares, world_size: usize) -> Plan {
        let operands: Vec<Operand<'_>> =
            given.iter().zip(&self.inputs).map(|(placement, shape)| Operand { placement, shape }).collect();
        match self.op.plan(&operands, shares, world_size) {
            Ok(plan) => plan,
            Err(error) => panic!("no plan for {given:?} on {world_size} ranks: {error}"),
        }
    }

    /// Whether `plan` gives what the op gives on the whole operands, which are keyed by the bit set of `Fill` operands.
    pub(crate) fn verify(
        &self,
        given: &[Placement],
        plan: &Plan,
        world_size: usize,
        whole_results: &mut HashMap<usize, Vec<Dense>>,
    ) -> Result<(), String> {
        let wholes: Vec<Dense> = (0..given.len()).map(|input| self.whole(input, &given[input])).collect();
        let fills =
            given.iter().rev().fold(0, |fills, placement| fills * 2 + usize::from(*placement == Placement::Fill));
        let expected = whole_results
            .entry(fills)
            .or_insert_with(|| (self.kernel)(&wholes, &Held { outputs: self.outputs.clone(), rows: None }));
        if (plan.inputs.len(), plan.outputs.len()) != (wholes.len(), expected.len()) {
            return Err("it has another number of inputs or outputs".to_owned());
        }

        let mut inputs = Vec::new();
        for ((whole, given), planned) in wholes.iter().zip(given).zip(&plan.inputs) {
            well_formed(planned, &whole.shape, world_size)?;
            let given = Spread::new(whole, given, world_size, self.unit as f64);
            inputs.push(given.redistribute(planned, world_size)?.parts);
        }
        let mut parts: Vec<Vec<Dense>> = vec![Vec::new(); expected.len()];
        for rank in 0..world_size {
            let own: Vec<Dense> = inputs.iter().map(|parts| parts[rank].clone()).collect();
            for (output, part) in self.run(&own, plan, expected, rank)?.into_iter().enumerate() {
                parts[output].push(part);
            }
        }
        for ((placement, parts), expected) in plan.outputs.iter().zip(parts).zip(expected) {
            well_formed(placement, &expected.shape, world_size)?;
            let output = Spread { placement: placement.clone(), parts }.assemble()?;
            if output != *expected {
                return Err(format!("it gives {output:?}, not {expected:?}"));
            }
        }
        Ok(())
    }

    /// What `rank` gives; without rows of the outputs, or of anything that is summed up, it runs nothing.
    fn run(&self, own: &[Dense], plan: &Plan, expected: &[Dense], rank: usize) -> Result<Vec<Dense>, String> {
        let is_empty =
            |placement: &Placement| matches!(placement, Placement::Shard { lengths, .. } if lengths.of(rank) == 0);
        let outputs = || plan.outputs.iter().zip(expected);
        let local = |(placement, whole): (&Placement, &Dense)| placement.local_shape(&whole.shape, rank);
        let is_shared = |placement: &Placement| matches!(placement, Placement::Shard { .. });
        let deciding = if plan.outputs.iter().any(is_shared) { &plan.outputs } else { &plan.inputs };
        if deciding.iter().any(is_empty) {
            return outputs()
                .map(|(placement, whole)| match placement {
                    Placement::Partial { op } => Ok(Dense::full(&whole.shape, identity(*op))),
                    empty if is_empty(empty) => Ok(Dense::full(&local((empty, whole)), 0.0)),
                    other => Err(format!("a rank without rows is to give {other}")),
                })
                .collect();
        }
        let shapes = |whole: &[Vec<usize>]| -> Vec<Vec<usize>> {
            plan.outputs.iter().zip(whole).map(|(placement, shape)| placement.local_shape(shape, rank)).collect()
        };
        let rows = match plan.inputs.first() {
            Some(Placement::Shard { dim, lengths }) => Some((*dim, lengths.range(rank))),
            _ => None,
        };
        let given = (self.kernel)(own, &Held { outputs: shapes(&self.outputs), rows });
        for (part, output) in given.iter().zip(outputs()) {
            if part.shape != local(output) {
                return Err(format!("rank {rank} gives shape {:?}, not {:?}", part.shape, local(output)));
            }
        }
        Ok(given)
    }

    fn whole(&self, input: usize, placement: &Placement) -> Dense {
        let (shape, unit) = (&self.inputs[input], self.unit as f64);
        let mut random = Random(input as u64);
        match placement {
            Placement::Fill => Dense::full(shape, (input as f64 + 3.0) * unit),
            Placement::Local | Placement::Replicate | Placement::Shard { .. } | Placement::Partial { .. } => {
                Dense::from_fn(shape, |_| random.small() * unit)
            }
        }
    }
}

impl Seen {
    fn count(&mut self, plan: &Plan) {
        for placement in &plan.outputs {
            match placement {
                Placement::Replicate => self.num_replicate += 1,
                Placement::Shard { .. } => self.num_shard += 1,
                Placement::Partial { .. } => self.num_partial += 1,
                Placement::Local | Placement::Fill => panic!("an output is {placement}"),
            }
        }
    }

    pub(crate) fn and(self, other: Seen) -> Seen {
        Seen {
            num_replicate: self.num_replicate + other.num_replicate,
            num_shard: self.num_shard + other.num_shard,
            num_partial: self.num_partial + other.num_partial,
        }
    }
}

/// Checks all cases and sums up what they came to.
pub(crate) fn check(cases: impl IntoIterator<Item = Case>) -> Seen {
    cases.into_iter().fold(Seen::default(), |seen, case| seen.and(case.check()))
}

/// That of a plan: spread, and sharded only on a dim longer than 1.
fn well_formed(placement: &Placement, shape: &[usize], world_size: usize) -> Result<(), String> {
    match placement {
        Placement::Local | Placement::Fill => Err(format!("{placement} is planned")),
        Placement::Shard { dim, .. } if shape[*dim] < 2 => Err(format!("{placement} of shape {shape:?}")),
        Placement::Shard { dim, lengths } if (lengths.total(), lengths.world_size()) != (shape[*dim], world_size) => {
            Err(format!("{placement} does not fit shape {shape:?}"))
        }
        Placement::Shard { .. } | Placement::Replicate | Placement::Partial { .. } => Ok(()),
    }
}

/// All placements of a tensor: all lengths if it is an op's one operand, else equal, unequal and zero ones.
pub(crate) fn placements(shape: &[usize], world_size: usize, num_operands: usize) -> Vec<Placement> {
    let mut placements = vec![Placement::Local, Placement::Fill, Placement::Replicate];
    placements.extend([PartialOp::Sum, PartialOp::Max, PartialOp::Min].map(|op| Placement::Partial { op }));
    for (dim, &total) in shape.iter().enumerate() {
        placements
            .extend(lengths(total, world_size, num_operands).into_iter().map(|lengths| Placement::shard(dim, lengths)));
    }
    placements
}

fn lengths(total: usize, world_size: usize, num_operands: usize) -> Vec<Vec<usize>> {
    if num_operands == 1 && total <= 8 {
        let heads = compositions(total, world_size - 1);
        return heads
            .into_iter()
            .map(|mut head| {
                head.push(total - head.iter().sum::<usize>());
                head
            })
            .collect();
    }
    let heavy_last = Shares::Weighted((1..=world_size as u32).map(|rank| rank * rank).collect());
    let odd_ranks_only = Shares::Weighted((0..world_size as u32).map(|rank| (rank + 1) % 2).collect());
    let all_last = Shares::Weighted((1..=world_size).map(|rank| u32::from(rank == world_size)).collect());
    let shares = [Shares::Equal, all_last, heavy_last, odd_ranks_only];
    let num_shares = if num_operands <= 2 { 4 } else { 2 };
    let lengths = shares[..num_shares].iter().map(|shares| shares.lengths(total, world_size).unwrap());
    let mut lengths: Vec<Vec<usize>> = lengths.map(|lengths| lengths.iter().collect()).collect();
    lengths.sort();
    lengths.dedup();
    lengths
}

/// All ways to hand out at most `total` to `num_ranks`.
fn compositions(total: usize, num_ranks: usize) -> Vec<Vec<usize>> {
    (0..num_ranks).fold(vec![Vec::new()], |heads, _| {
        heads
            .into_iter()
            .flat_map(|head| {
                let rest = total - head.iter().sum::<usize>();
                (0..=rest).map(move |next| head.iter().copied().chain([next]).collect())
            })
            .collect()
    })
}

/// One share is enough where an operand's own decide.
fn shares(given: &[Placement], world_size: usize) -> Vec<Shares> {
    let mut shares = vec![Shares::Equal];
    if !given.iter().any(|placement| matches!(placement, Placement::Shard { .. })) {
        shares.push(Shares::Weighted((0..world_size as u32).map(|rank| 2 * rank + 1).collect()));
        if world_size > 1 {
            shares.push(Shares::First(2));
        }
    }
    shares
}

fn product(choices: impl Iterator<Item = Vec<Placement>>) -> Vec<Vec<Placement>> {
    choices.fold(vec![Vec::new()], |heads: Vec<Vec<Placement>>, choice| {
        let extended = |head: &Vec<Placement>, next: &Placement| head.iter().chain([next]).cloned().collect();
        heads.iter().flat_map(|head| choice.iter().map(move |next| extended(head, next))).collect()
    })
}
