//! Streams a MoE model from Rust, with no crate: block 0's experts in CPU memory, all others from the file.
//!
//!     rustc --edition 2021 -O stream.rs -L FOLDER -l dylib=moestream -l dylib=llama -C link-arg=-Wl,-rpath,FOLDER && ./stream MODEL.gguf
//!
//! llama.cpp's parameter structs are carried as opaque bytes, larger than any of them: moestream sets what it needs.
use std::{ffi::{c_char, c_void, CStr, CString}, mem::zeroed, ptr::null_mut};

type Ptr = *mut c_void;

#[repr(C)] struct Error { struct_size: usize, status: i32, os_errno: i32, message: [c_char; 512] }
#[repr(C)]
struct Params {
    struct_size: usize, rules: *const c_void, n_rules: usize, n_cpu_moe: i32, cpu_moe: i32, cpu_moe_layers: *const i32,
    n_cpu_moe_layers: usize, n_gpu_layers: i32, stream: i32, dense: i32, cache_bytes: u64, cache_none: i32, io: i32,
    direct: i32, queue_depth: i32, n_readers: i32, prefetch: i32, verify: i32, deadline_ms: u32, libllama: Ptr,
}
#[repr(C)] struct Opaque([u64; 64]);

extern "C" {
    fn moestream_log_capture(libllama: Ptr, level: i32, err: *mut Error) -> i32;
    fn moestream_open(store: *mut Ptr, path: *const c_char, params: *const Params, err: *mut Error) -> i32;
    fn moestream_load_model(store: Ptr, model: *mut Ptr, params: *const Opaque, err: *mut Error) -> i32;
    fn moestream_context_init(hook: *mut Ptr, store: Ptr, params: *mut Opaque, err: *mut Error) -> i32;
    fn moestream_context_status(hook: Ptr, err: *mut Error) -> i32;
    fn moestream_context_free(hook: Ptr);
    fn moestream_close(store: Ptr, err: *mut Error) -> i32;
    fn moestream_describe(store: Ptr) -> *const c_char;
    fn llama_model_default_params() -> Opaque;
    fn llama_context_default_params() -> Opaque;
    fn llama_init_from_model(model: Ptr, params: Opaque) -> Ptr;
    fn llama_set_n_threads(ctx: Ptr, n: i32, n_batch: i32);
    fn llama_model_get_vocab(model: Ptr) -> Ptr;
    fn llama_vocab_n_tokens(vocab: Ptr) -> i32;
    fn llama_batch_get_one(tokens: *mut i32, n: i32) -> Opaque;
    fn llama_decode(ctx: Ptr, batch: Opaque) -> i32;
    fn llama_get_logits_ith(ctx: Ptr, i: i32) -> *const f32;
    fn llama_free(ctx: Ptr);
    fn llama_model_free(model: Ptr);
}

fn main() {
    let path = CString::new(std::env::args().nth(1).expect("usage: stream MODEL.gguf")).unwrap();
    unsafe {
        let e: *mut Error = &mut Error { struct_size: size_of::<Error>(), ..zeroed() };
        let check = |status: i32| assert!(status == 0, "{}", CStr::from_ptr((*e).message.as_ptr()).to_string_lossy());
        // Zero is each option's default: streaming is on, and the cache is as large as memory allows.
        let options = Params { struct_size: size_of::<Params>(), n_cpu_moe: 1, ..zeroed() };
        let (mut store, mut model, mut hook) = (null_mut(), null_mut(), null_mut());
        let mut cparams = llama_context_default_params();
        check(moestream_log_capture(null_mut(), 3, e)); // llama.cpp's log: warnings, into a ring, not to stderr
        check(moestream_open(&mut store, path.as_ptr(), &options, e));
        check(moestream_load_model(store, &mut model, &llama_model_default_params(), e));
        check(moestream_context_init(&mut hook, store, &mut cparams, e));
        let ctx = llama_init_from_model(model, cparams);
        llama_set_n_threads(ctx, 1, 1);
        println!("{}", CStr::from_ptr(moestream_describe(store)).to_string_lossy());

        let n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model)) as usize;
        let (mut tokens, mut hash) = ([1, 2, 3, 4, 5, 6, 7, 8], 14695981039346656037u64);
        for n in [8, 1, 1, 1, 1, 1, 1, 1] {
            let code = llama_decode(ctx, llama_batch_get_one(tokens.as_mut_ptr(), n));
            check(moestream_context_status(hook, e));
            assert!(code == 0, "llama_decode returned {code}");
            let logits = std::slice::from_raw_parts(llama_get_logits_ith(ctx, -1), n_vocab);
            tokens[0] = (1..n_vocab).fold(0, |best, i| if logits[i] > logits[best] { i } else { best }) as i32;
            for byte in logits.iter().flat_map(|x| x.to_ne_bytes()) {
                hash = (hash ^ byte as u64).wrapping_mul(1099511628211); // FNV-1a
            }
            println!("token {}", tokens[0]);
        }
        println!("logits {hash:016x}");
        llama_free(ctx);
        moestream_context_free(hook);
        llama_model_free(model);
        check(moestream_close(store, e));
    }
}
