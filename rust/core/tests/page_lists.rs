//! Page lists: what they say, and how little of them is written. That they equal the block tables in every history is
//! checked by the engine of the other tests.
#![cfg(not(loom))]

use pykv_core::scheduler::{
    AdmissionPolicy, Outcome, OwnedArrays, OwnedPageLists, Plan, Sampled, Submission, TableSync,
};
use pykv_core::{Error, Scheduler, SchedulerConfig};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        num_blocks: 40,
        block_size: 4,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_model_len: 64,
        enable_prefix_caching: false,
        admission: AdmissionPolicy::Watermark,
        ..SchedulerConfig::default()
    }
}

struct Run {
    scheduler: Scheduler,
    arrays: OwnedArrays,
    sync: TableSync,
}

impl Run {
    fn new(lengths: &[usize]) -> Self {
        let mut scheduler = Scheduler::new(config()).unwrap();
        for &length in lengths {
            scheduler.submit(Submission::new(&vec![1; length])).unwrap();
        }
        Self { scheduler, arrays: OwnedArrays::with_page_lists(&config()), sync: TableSync::default() }
    }

    fn plan(&mut self) -> Plan {
        self.scheduler.plan(&self.arrays.borrow(), &mut self.sync, 0.0).unwrap().unwrap()
    }

    fn apply(&mut self, plan: Plan) {
        let (tokens, outcomes) = (vec![7; plan.num_samples], vec![Outcome::Ok; plan.num_samples]);
        let sampled = Sampled { tokens: &tokens, outcomes: &outcomes, failed_rows: &[], accepted: None };
        self.scheduler.apply(plan.id, sampled, |_, _| ()).unwrap();
    }

    fn lists(&mut self) -> &mut OwnedPageLists {
        self.arrays.page_lists.as_mut().unwrap()
    }
}

#[test]
fn lists_follow_each_other_and_the_last_block_counts_its_tokens() {
    let mut run = Run::new(&[4, 5, 1]);
    run.plan();
    let lists = run.lists();
    assert_eq!(lists.kv_indptr[..4], [0, 1, 3, 4]);
    assert_eq!(lists.kv_last_page_len[..3], [4, 1, 1]);
    let mut blocks = lists.kv_indices[..4].to_vec();
    blocks.sort_unstable();
    blocks.dedup();
    assert_eq!((blocks.len(), blocks[0] > 0), (4, true));
}

#[test]
fn a_sequence_alone_writes_only_the_block_that_is_new() {
    let mut run = Run::new(&[30]);
    let plan = run.plan();
    run.apply(plan);
    run.lists().kv_indices.fill(-1);
    let mut written = Vec::new();
    for _ in 0..4 {
        let plan = run.plan();
        written.push(run.lists().kv_indices.iter().filter(|&&block| block != -1).count());
        run.apply(plan);
    }
    assert_eq!(written, [0, 0, 1, 1], "position 32 takes a block");
}

#[test]
fn what_has_moved_is_written_again() {
    let mut run = Run::new(&[7, 8]);
    for _ in 0..12 {
        let plan = run.plan();
        let starts: Vec<_> = run.lists().kv_indptr[..3].to_vec();
        let columns = config().max_blocks_per_seq();
        for batch_row in 0..2 {
            let row = run.arrays.table_rows[batch_row] as usize * columns;
            let (start, end) = (starts[batch_row] as usize, starts[batch_row + 1] as usize);
            let expected = run.arrays.block_tables[row..row + end - start].to_vec();
            assert_eq!(run.lists().kv_indices[start..end], expected);
        }
        run.apply(plan);
    }
}

#[test]
fn lists_that_are_too_short_are_refused_before_anything_is_planned() {
    for shorten in [
        (|lists| lists.kv_indptr.truncate(4)) as fn(&mut OwnedPageLists),
        |lists| lists.kv_indices.truncate(63),
        |lists| lists.kv_last_page_len.truncate(3),
    ] {
        let mut run = Run::new(&[5]);
        shorten(run.lists());
        let error = run.scheduler.plan(&run.arrays.borrow(), &mut run.sync, 0.0).unwrap_err();
        assert!(matches!(error, Error::ArrayLength { array, .. } if array.starts_with("kv_")), "{error}");
        assert_eq!(run.scheduler.stats().num_waiting, 1);
    }
}
