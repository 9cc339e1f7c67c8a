//! Recordings that agree, that were changed, and that are none.

use super::*;
use crate::groups::LayerGroup;
use crate::policy::preemption::PreemptionMode;
use crate::scheduler::{AdmissionPolicy, Outcome, OwnedArrays};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        num_blocks: 14,
        num_host_blocks: 6,
        preemption: PreemptionMode::Swap,
        admission: AdmissionPolicy::Watermark,
        block_size: 4,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        num_lookahead_tokens: 2,
        max_model_len: 40,
        ..SchedulerConfig::default()
    }
}

/// A run with hits, samples that fork, preemptions, a pause, an abort, a discarded step and a refusal.
fn record(token: u32) -> Vec<u8> {
    let mut scheduler = RecordedScheduler::new(config()).unwrap();
    assert!(scheduler.start_recording());
    let (mut arrays, mut sync) = (OwnedArrays::new(&config()), TableSync::default());
    let prompt: Vec<u32> = (0..10).collect();
    for num_samples in [1, 2, 1] {
        let submission = Submission { num_samples, max_tokens: Some(20), ..Submission::new(&prompt) };
        scheduler.submit(submission).unwrap();
    }
    scheduler.submit(Submission::new(&[])).unwrap_err();
    scheduler.set_costs(Costs { seconds_per_token: 1.0, seconds_per_block: 0.5 }).unwrap();
    for round in 0..200 {
        let drafts = Proposal { rows: &[0, 2], starts: &[0, 2, 3], tokens: &[7, 8, token + round as u32] };
        scheduler.propose(drafts).unwrap();
        let Some(plan) = scheduler.plan(&arrays.borrow(), &mut sync, f64::from(round)).unwrap() else {
            break;
        };
        if round == 3 {
            scheduler.discard(plan.id).unwrap();
            scheduler.abort(RequestId::new(2));
            continue;
        }
        if round == 5 {
            scheduler.pause(RequestId::new(0));
        }
        if round == 9 {
            scheduler.resume(RequestId::new(0));
        }
        let tokens: Vec<u32> =
            (0..plan.num_samples as u32).map(|sample| token + sample + round as u32).collect();
        let outcomes = vec![Outcome::Ok; plan.num_samples];
        let accepted = vec![0; plan.num_batch_rows];
        let accepted = (round % 2 == 0).then_some(accepted.as_slice());
        let sampled = Sampled { tokens: &tokens, outcomes: &outcomes, failed_rows: &[], accepted };
        scheduler.apply(plan.id, sampled, |_, _| ()).unwrap();
    }
    assert!(scheduler.scheduler().stats().preemptions > 0);
    scheduler.reset_prefix_cache();
    scheduler.take_ended();
    scheduler.finish_recording()
}

#[test]
fn a_recording_gives_the_same_decisions_again() {
    let recording = record(5);
    let replayed = replay(&recording, Ending::Complete).unwrap();
    assert!(replayed.num_plans > 20 && replayed.num_calls > 2 * replayed.num_plans);
    assert_eq!(recording, record(5), "and the same bytes");
}

/// A run with two steps in flight: ends, failures and aborts in between, and either step discarded.
fn record_overlapped() -> Vec<u8> {
    let config = SchedulerConfig { num_lookahead_tokens: 0, max_steps_in_flight: 2, ..config() };
    let mut scheduler = RecordedScheduler::new(config.clone()).unwrap();
    assert!(scheduler.start_recording());
    let mut buffers = [0, 1].map(|_| (OwnedArrays::new(&config), TableSync::default()));
    let prompt: Vec<u32> = (0..10).collect();
    for num_samples in [1, 2, 1, 1] {
        let submission = Submission { num_samples, max_tokens: Some(20), ..Submission::new(&prompt) };
        scheduler.submit(submission).unwrap();
    }
    let mut in_flight: Vec<(Plan, usize)> = Vec::new();
    let mut num_overlapped = 0;
    for round in 0..200_usize {
        let side = in_flight.first().map_or(0, |(_, side)| 1 - side);
        let (arrays, sync) = &mut buffers[side];
        if let Some(plan) = scheduler.plan(&arrays.borrow(), sync, round as f64).unwrap() {
            in_flight.push((plan, side));
            if let [(oldest, _), _] = in_flight[..] {
                let (other, sync) = &mut buffers[1 - side];
                scheduler.plan(&other.borrow(), sync, 0.0).unwrap_err();
                num_overlapped += usize::from(oldest.num_samples > 0);
            } else {
                let (arrays, sync) = &mut buffers[side];
                scheduler.plan(&arrays.borrow(), sync, 0.0).unwrap_err();
                continue;
            }
        }
        let Some(&(oldest, _)) = in_flight.first() else { break };
        match round % 9 {
            5 => scheduler.discard(in_flight.pop().unwrap().0.id).unwrap(),
            7 => {
                scheduler.discard(oldest.id).unwrap();
                in_flight.clear();
                scheduler.abort(RequestId::new(2));
            }
            _ => {
                let tokens = vec![round as u32; oldest.num_samples];
                let mut outcomes = vec![Outcome::Ok; oldest.num_samples];
                if round == 30 {
                    outcomes.fill(Outcome::Stop);
                }
                let failed_rows: &[usize] = if round == 2 { &[0] } else { &[] };
                let sampled = Sampled { tokens: &tokens, outcomes: &outcomes, failed_rows, accepted: None };
                scheduler.apply(oldest.id, sampled, |_, _| ()).unwrap();
                in_flight.remove(0);
            }
        }
        scheduler.scheduler().check().unwrap();
    }
    assert!(num_overlapped > 10, "{num_overlapped}");
    scheduler.take_ended();
    scheduler.finish_recording()
}

#[test]
fn a_recording_of_two_steps_in_flight_gives_the_same_decisions_again() {
    let recording = record_overlapped();
    let replayed = replay(&recording, Ending::Complete).unwrap();
    assert!(replayed.num_plans > 20, "{replayed:?}");
    assert_eq!(recording, record_overlapped(), "and the same bytes");
}

#[test]
fn a_recording_can_start_only_before_the_first_call() {
    let mut scheduler = RecordedScheduler::new(config()).unwrap();
    scheduler.submit(Submission::new(&[1])).unwrap();
    assert!(!scheduler.start_recording());
    assert!(scheduler.take_recording().is_empty());
}

#[test]
fn a_changed_decision_is_named() {
    let recording = record(5);
    let mut writer = chunks::ChunkWriter::new();
    let (chunks, _) = chunks::chunks_of(&recording, Ending::Complete).unwrap();
    for chunk in &chunks {
        writer.bytes().extend(chunk.bytes);
        if chunk.kind == chunks::Kind::Calls {
            let last_digest = writer.bytes().len() - 3;
            writer.bytes()[last_digest] ^= 1;
        }
        writer.close(chunk.kind);
    }
    let replayed = replay(&writer.take(), Ending::Complete);
    assert!(matches!(replayed, Err(ReplayError::Diverged { verb, .. }) if verb == "TakeEnded"));
}

#[test]
fn a_recording_that_asks_for_absurd_memory_is_refused() {
    let small = SchedulerConfig { num_blocks: 1 << 20, max_num_seqs: 4096, ..SchedulerConfig::default() };
    assert!(replay(&Writer::new(&small).finish(), Ending::Complete).is_ok(), "as large as real ones");
    for absurd in [
        SchedulerConfig { num_blocks: 1 << 30, block_size: 2, ..small.clone() },
        SchedulerConfig { num_host_blocks: 1 << 30, ..small.clone() },
        SchedulerConfig { max_num_seqs: 1 << 20, max_model_len: 1 << 24, ..small.clone() },
        SchedulerConfig { max_num_batched_tokens: 1 << 30, ..small.clone() },
        SchedulerConfig {
            groups: vec![LayerGroup::Full; 64],
            max_num_batched_tokens: 1 << 24,
            ..small.clone()
        },
        SchedulerConfig { max_num_seqs: 1 << 20, num_lookahead_tokens: 1024, ..small.clone() },
    ] {
        absurd.validate().unwrap();
        let error = replay(&Writer::new(&absurd).finish(), Ending::Complete).unwrap_err();
        assert!(matches!(error, ReplayError::TooLarge { .. }), "{error}");
    }
}

/// Three calls, each in a chunk of its own; and where each chunk ends.
fn short_recording() -> (Vec<u8>, Vec<usize>) {
    let mut scheduler = RecordedScheduler::new(config()).unwrap();
    assert!(scheduler.start_recording());
    let (mut bytes, mut ends) = (scheduler.take_recording(), Vec::new());
    for token in 0..3 {
        ends.push(bytes.len());
        scheduler.submit(Submission { max_tokens: Some(4), ..Submission::new(&[token; 9]) }).unwrap();
        bytes.extend(scheduler.take_recording());
    }
    ends.push(bytes.len());
    bytes.extend(scheduler.finish_recording());
    (bytes, ends)
}

#[test]
fn a_recording_that_is_cut_is_refused_wherever_it_ends_and_readable_on_demand() {
    let (recording, ends) = short_recording();
    assert_eq!(
        replay(&recording, Ending::MayBeCut),
        Ok(Replayed { num_calls: 3, num_plans: 0, is_cut: false })
    );
    for len in 0..recording.len() {
        let cut = &recording[..len];
        assert!(replay(cut, Ending::Complete).is_err(), "cut at {len}");
        let num_whole = ends.iter().filter(|&&end| end <= len).count() as u64;
        match replay(cut, Ending::MayBeCut) {
            Ok(replayed) => {
                assert_eq!(replayed, Replayed { num_calls: num_whole - 1, num_plans: 0, is_cut: true });
            }
            Err(_) => assert_eq!(num_whole, 0, "cut at {len}"),
        }
    }
    let message = replay(&recording[..ends[2] + 5], Ending::Complete).unwrap_err().to_string();
    assert!(message.contains(&format!("cut at byte {}", ends[2])), "{message}");
}

#[test]
fn every_changed_bit_is_found() {
    let (recording, _) = short_recording();
    for place in 0..8 * recording.len() {
        let mut changed = recording.clone();
        changed[place / 8] ^= 1 << (place % 8);
        assert!(replay(&changed, Ending::Complete).is_err(), "bit {place}");
    }
}

#[test]
fn damage_is_no_cut() {
    let (recording, ends) = short_recording();
    let (first, third, end) = (ends[0], ends[2], ends[3]);
    for bytes in [&recording[..], &recording[..third], &recording[..third + 5]] {
        // Of a cut recording the last whole chunk can be said to be damaged by none behind it.
        let last = if bytes.len() == recording.len() { end } else { ends[1] };
        for place in 8 * first..8 * last {
            let mut changed = bytes.to_vec();
            changed[place / 8] ^= 1 << (place % 8);
            let is_length = ends.iter().any(|&start| (start + 1..start + 9).contains(&(place / 8)));
            let result = replay(&changed, Ending::MayBeCut);
            // Where a chunk without end mark behind it tells a wrong length, nothing behind it can be found.
            if !is_length || bytes.len() == recording.len() {
                let error = result.unwrap_err().to_string();
                assert!(error.contains("was damaged: others follow it"), "bit {place}: {error}");
            }
        }
    }
    let without_second = [&recording[..ends[1]], &recording[ends[2]..]].concat();
    assert!(replay(&without_second, Ending::MayBeCut).is_err());
}

#[test]
fn chunks_that_are_left_out_doubled_moved_or_added_are_found() {
    let (recording, ends) = short_recording();
    let [first, second, third, end] = ends[..] else { panic!("three calls") };
    let part = |range: std::ops::Range<usize>| &recording[range];
    let tail = part(third..recording.len());
    for changed in [
        [part(0..second), tail].concat(),
        [part(0..second), part(first..second), part(second..recording.len())].concat(),
        [part(0..first), part(second..third), part(first..second), tail].concat(),
        [&recording, part(end..recording.len())].concat(),
        [&recording, &b"x"[..]].concat(),
    ] {
        assert!(replay(&changed, Ending::Complete).is_err());
    }
}

#[test]
fn what_is_no_recording_of_this_format_is_refused() {
    for bytes in [&b""[..], b"something else, long enough", b"pykv-recording", b"pykv-recording-"] {
        let error = replay(bytes, Ending::MayBeCut).unwrap_err();
        assert!(matches!(error, ReplayError::Malformed { offset: 0, .. }), "{error}");
    }
    let error = replay(b"pykv-recording-6 and so on", Ending::MayBeCut).unwrap_err();
    assert_eq!(error.to_string(), "the recording has format 6: this version reads format 7");
}
