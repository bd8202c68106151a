// Streams a MoE model from Node.js through koffi: block 0's experts in CPU memory, all others from the file.
//   npm install && node stream.mjs FOLDER_OF_THE_LIBRARIES MODEL.gguf
// llama.cpp's parameter structs are carried as opaque bytes, larger than any of them: moestream sets what it needs.
import koffi from 'koffi';

const [folder, path] = process.argv.slice(2);
const ms = koffi.load(`${folder}/libmoestream.so`);
const llama = koffi.load(`${folder}/libllama.so`);

koffi.struct('Opaque', { bytes: koffi.array('uint64_t', 64) });
const MsError = koffi.struct('MsError', { struct_size: 'size_t', status: 'int32_t', os_errno: 'int32_t', message: koffi.array('char', 512) });
const Params = koffi.struct('Params', {
    struct_size: 'size_t', rules: 'void *', n_rules: 'size_t', n_cpu_moe: 'int32_t', cpu_moe: 'int32_t',
    cpu_moe_layers: 'void *', n_cpu_moe_layers: 'size_t', n_gpu_layers: 'int32_t', stream: 'int32_t', dense: 'int32_t',
    cache_bytes: 'uint64_t', cache_none: 'int32_t', io: 'int32_t', direct: 'int32_t', queue_depth: 'int32_t',
    n_readers: 'int32_t', prefetch: 'int32_t', verify: 'int32_t', deadline_ms: 'uint32_t', libllama: 'void *',
});
const PlanInfo = koffi.struct('PlanInfo', { struct_size: 'size_t', n: koffi.array('int32_t', 10), bytes: koffi.array('uint64_t', 6) });

const logCapture = ms.func('int moestream_log_capture(void * libllama, int32_t level, _Inout_ MsError * err)');
const planOpen = ms.func('int moestream_plan_open(_Out_ void ** plan, const char * path, Params * params, _Inout_ MsError * err)');
const planInfo = ms.func('int moestream_plan_get_info(void * plan, _Inout_ PlanInfo * info)');
const planClose = ms.func('void moestream_plan_close(void * plan)');
const open = ms.func('int moestream_open(_Out_ void ** store, const char * path, Params * params, _Inout_ MsError * err)');
const load = ms.func('int moestream_load_model(void * store, _Out_ void ** model, Opaque * params, _Inout_ MsError * err)');
const contextInit = ms.func('int moestream_context_init(_Out_ void ** hook, void * store, _Inout_ Opaque * params, _Inout_ MsError * err)');
const contextStatus = ms.func('int moestream_context_status(void * hook, _Inout_ MsError * err)');
const contextFree = ms.func('void moestream_context_free(void * hook)');
const close = ms.func('int moestream_close(void * store, _Inout_ MsError * err)');
const describe = ms.func('const char * moestream_describe(void * store)');
const decode = llama.func('int llama_decode(void * ctx, Opaque batch)');
const batchGetOne = llama.func('Opaque llama_batch_get_one(int32_t * tokens, int32_t n)');
const getLogits = llama.func('void * llama_get_logits_ith(void * ctx, int32_t i)');

const err = { struct_size: koffi.sizeof(MsError), status: 0, os_errno: 0, message: '' };
function check(status) {
    if (status !== 0) throw new Error(err.message);
}
const none = { rules: null, n_rules: 0, cpu_moe: 0, cpu_moe_layers: null, n_cpu_moe_layers: 0, n_gpu_layers: 0, stream: 0, dense: 0,
    cache_none: 0, io: 0, direct: 0, queue_depth: 0, n_readers: 0, verify: 0, deadline_ms: 0, libllama: null };
const options = { ...none, struct_size: koffi.sizeof(Params), n_cpu_moe: 1, cache_bytes: 1, prefetch: 1 };
const plan = [null], store = [null], model = [null], hook = [null];
const info = { struct_size: koffi.sizeof(PlanInfo), n: new Array(10).fill(0), bytes: new Array(6).fill(0) };
check(logCapture(null, 3, err)); // llama.cpp's log: warnings, into a ring, not to stderr
check(planOpen(plan, path, options, err));
planInfo(plan[0], info);
planClose(plan[0]);
options.cache_bytes = info.bytes[4]; // min_cache_bytes

check(open(store, path, options, err));
check(load(store[0], model, llama.func('Opaque llama_model_default_params()')(), err));
const params = llama.func('Opaque llama_context_default_params()')();
check(contextInit(hook, store[0], params, err));
const context = llama.func('void * llama_init_from_model(void * model, Opaque params)')(model[0], params);
llama.func('void llama_set_n_threads(void * ctx, int32_t n, int32_t n_batch)')(context, 1, 1);
console.log(describe(store[0]));

const vocab = llama.func('void * llama_model_get_vocab(void * model)')(model[0]);
const nVocab = llama.func('int32_t llama_vocab_n_tokens(void * vocab)')(vocab);
let tokens = Int32Array.from([1, 2, 3, 4, 5, 6, 7, 8]), hash = 14695981039346656037n;
for (let step = 0; step < 8; step++) {
    const code = decode(context, batchGetOne(tokens, tokens.length));
    check(contextStatus(hook[0], err));
    if (code !== 0) throw new Error(`llama_decode returned ${code}`);
    const logits = Float32Array.from(koffi.decode(getLogits(context, -1), 'float', nVocab));
    tokens = Int32Array.of(logits.reduce((best, value, i) => (value > logits[best] ? i : best), 0));
    for (const byte of new Uint8Array(logits.buffer)) hash = BigInt.asUintN(64, (hash ^ BigInt(byte)) * 1099511628211n); // FNV-1a
    console.log('token', tokens[0]);
}
console.log('logits', hash.toString(16).padStart(16, '0'));
llama.func('void llama_free(void * ctx)')(context);
contextFree(hook[0]);
llama.func('void llama_model_free(void * model)')(model[0]);
check(close(store[0], err));
