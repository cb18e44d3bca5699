-- Written by `make generate`: a copy of deploy/gateway/key.lua.

-- Adds the header x-specops-key, by which Envoy routes a request: a hash of its session, its user, or
-- the beginning of its prompt. Replicas and logs see only the hash, never the text.

local MAX_BYTES = 512    -- hashed of each text
local MAX_STEPS = 20000  -- through a body: a million brackets must not delay other requests
local QUOTE, OPEN, LIST = 34, 123, 91

-- The position after the string that begins at `i`.
local function behind_string(text, i)
  while true do
    i = text:find('["\\]', i + 1)
    if not i then return #text + 1 end
    if text:byte(i) == QUOTE then return i + 1 end
    i = i + 1 -- the escaped character
  end
end

-- The position after the JSON value that begins at `i`, and the number of steps to it.
local function behind(text, i)
  local first = text:byte(i)
  if first == QUOTE then return behind_string(text, i), 1 end
  if first ~= OPEN and first ~= LIST then return text:find('[,%]}%s]', i) or #text + 1, 1 end
  local depth, steps = 0, 0
  while steps < MAX_STEPS do
    i = text:find('["{}%[%]]', i)
    if not i then return #text + 1, steps end
    local byte = text:byte(i)
    steps = steps + 1
    if byte == QUOTE then
      i = behind_string(text, i)
    else
      depth = depth + ((byte == OPEN or byte == LIST) and 1 or -1)
      i = i + 1
      if depth == 0 then return i, steps end
    end
  end
  return #text + 1, steps
end

-- The fields of a JSON object; values keep their JSON text.
local function fields(text)
  local values, steps = {}, 0
  local i = text:match('^%s*{()')
  while i and steps < MAX_STEPS do
    i = text:match('^[%s,]*()"', i)
    if not i then break end
    local last = behind_string(text, i)
    local value = text:match('^%s*:%s*()[^%s]', last)
    if not value then break end
    local next_one, taken = behind(text, value)
    values[text:sub(i + 1, last - 2)] = text:sub(value, next_one - 1)
    i, steps = next_one, steps + taken
  end
  return values
end

-- The beginning of a conversation, up to the user's first message, which later turns do not change.
local function beginning(value)
  if value:byte(1) ~= LIST then return value:sub(1, MAX_BYTES) end
  local parts, i = {}, 2
  for _ = 1, 8 do
    i = value:match('^[%s,]*()[^%s,%]]', i)
    if not i then break end
    local last = behind(value, i)
    local part = value:sub(i, last - 1)
    parts[#parts + 1] = part:sub(1, MAX_BYTES)
    if part:find('"role"%s*:%s*"user"') or part:byte(1) ~= OPEN then break end
    i = last
  end
  return table.concat(parts, '\n')
end

-- The part that stays the same while somebody types: a chunk of another file, or the file's beginning.
local function infill_key(request)
  local text, chunks = request.input_prefix, request.input_extra or ''
  local first = chunks:match('^%[%s*(){')
  if first then text = chunks:sub(first, behind(chunks, first) - 1) end
  return 'gap ' .. text:sub(1, MAX_BYTES)
end

local function text_key(body)
  local request = fields(body)
  local user = request.user or (request.metadata or ''):match('"user_id"%s*:%s*(".-")')
  if user and user:byte(1) == QUOTE and #user > 2 then return 'user ' .. user:sub(1, MAX_BYTES) end
  if request.input_prefix then return infill_key(request) end
  local system = (request.system or request.instructions or ''):sub(1, MAX_BYTES)
  local prompt = request.messages or request.input or request.prompt
  if not prompt then return nil end
  return 'text ' .. system .. '\n' .. beginning(prompt)
end

-- A polynomial modulo the largest prime below 2^32, exact in a double.
local function hash(text)
  local value = 0
  for i = 1, #text do value = (value * 257 + text:byte(i) + 1) % 4294967291 end
  return string.format('%08x', value)
end

function envoy_on_request(handle)
  local headers = handle:headers()
  headers:remove('x-specops-key')
  local session = headers:get('x-session-id')
  local client = headers:get('authorization') or headers:get('x-api-key') or ''
  local key
  if session and #session > 0 then
    key = 'session ' .. session:sub(1, MAX_BYTES)
  else
    local body = handle:body() -- waits for the whole body; `headers` is invalid after that
    if body then key = text_key(body:getBytes(0, body:length())) end
  end
  if not key then return end
  -- Equal sessions of two clients get different keys: clients do not share a prefix cache either.
  handle:headers():add('x-specops-key', hash(client .. '\n' .. key))
end
